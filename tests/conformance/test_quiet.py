"""Invariant 10: a correct use raises no warning and makes transformers log none.

Warnings are errors in the whole suite and `conftest.py` fails a test in which transformers logs, so these tests only
have to use things; the first three show that they would notice.
"""

import warnings
from pathlib import Path

import pytest
import transformers
from transformers import LlamaConfig

from hf_posext import (
    export_config,
    inspect_model,
    list_methods,
    load_pretrained,
    patch_model,
    patched,
    unpatch_model,
    write_record,
)
from tests.architectures import ARCHITECTURE, tiny_model
from tests.host_logs import Lines, listening
from tests.methods import pairs, patch_row
from tests.snapshots import logits_of


def test_a_warning_is_an_error_here() -> None:
    with pytest.raises(DeprecationWarning):
        warnings.warn("old", DeprecationWarning, stacklevel=1)


@pytest.mark.transformers_logs("the line is made on purpose")
def test_a_log_line_of_transformers_is_noticed(host_logs: Lines) -> None:
    LlamaConfig(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "nonsense": 1})
    assert host_logs.complaints()


@pytest.mark.transformers_logs("the line is made on purpose")
def test_a_line_that_is_logged_once_is_noticed_each_time() -> None:
    logger = transformers.utils.logging.get_logger("transformers.anything")
    with listening() as first:
        logger.warning_once("only once")
    with listening() as second:
        logger.warning_once("only once")
    assert (first.lines, second.lines) == (["only once"], ["only once"])


@pytest.mark.parametrize(
    ("architecture", "method"), pairs(("llama", "gemma3", "gpt_neox", "gptj", "llama_yarn", "phi3"))
)
def test_patch_run_save_load_and_unpatch_are_silent(
    architecture: str, method: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    transformers.utils.logging.disable_progress_bar()
    model = patch_row(tiny_model(architecture), architecture, method)
    logits_of(model, 48)
    inspect_model(model)
    write_record(model, tmp_path)
    model.save_pretrained(tmp_path)
    loaded = load_pretrained(tmp_path, getattr(transformers, ARCHITECTURE[architecture].auto_class))
    unpatch_model(loaded)
    unpatch_model(model)
    transformers.utils.logging.enable_progress_bar()
    assert capfd.readouterr() == ("", "")


def test_patching_a_model_in_training_mode_is_silent() -> None:
    patch_model(tiny_model("llama").train(), "yarn", 2)


def test_small_words_are_silent() -> None:
    model = tiny_model("llama")
    list_methods(model)
    with patched(model, "yarn", target_length=100):
        export_config(model, layout="v5")
