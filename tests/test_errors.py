"""Every bad argument: the message names the value, what is allowed and the next step, and the model keeps every bit."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import nn

from hf_posext import NoSiteError, PatchError, inspect_model, patch_model, record_of
from tests import special_models
from tests.architectures import tiny_inputs, tiny_model
from tests.methods import ramp
from tests.snapshots import differences, snapshot

NAN, INF = float("nan"), float("inf")
EIGHT = r"must have 8 values, half of the 16 channels that rotate, got "
NOT_FINITE = r"`factor` must be a finite number >= 1, got "

BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "factor is a bool": ({"factor": True}, TypeError, NOT_FINITE + "True of type bool"),
    "factor is text": ({"factor": "2"}, TypeError, NOT_FINITE + "'2' of type str"),
    "factor is a list": ({"factor": [2]}, TypeError, NOT_FINITE + r"\[2\] of type list"),
    "factor is complex": ({"factor": 2j}, TypeError, NOT_FINITE + "2j of type complex"),
    "factor is nan": ({"factor": NAN}, ValueError, NOT_FINITE + "nan"),
    "factor is infinite": ({"factor": INF}, ValueError, NOT_FINITE + "inf"),
    "factor is 0": ({"factor": 0}, ValueError, NOT_FINITE + "0.*lower `max_position_embeddings`"),
    "factor is negative": ({"factor": -2}, ValueError, NOT_FINITE + "-2"),
    "factor is 0.5": ({"factor": 0.5}, ValueError, NOT_FINITE + "0.5.*lower `max_position_embeddings`"),
    "both": (
        {"factor": 2, "target_length": 64},
        ValueError,
        r"exactly one of `factor` and `target_length`, got `factor`=2 and `target_length`=64\. For twice .* factor=2",
    ),
    "neither": (
        {},
        ValueError,
        r"exactly one of `factor` and `target_length`, got neither\. .*factor=2 or target_length=64",
    ),
    "target is below N": (
        {"target_length": 31},
        ValueError,
        "`target_length` must be at least the trained length 32, got 31",
    ),
    "target is a float": (
        {"target_length": 64.0},
        TypeError,
        "`target_length` must be a whole number of tokens, got 64.0",
    ),
    "target is a bool": (
        {"target_length": True},
        TypeError,
        "`target_length` must be a whole number of tokens, got True",
    ),
    "target is 0": ({"target_length": 0}, ValueError, "`target_length` must be at least 1 token, got 0"),
    "N is 0": (
        {"factor": 2, "original_max_position_embeddings": 0},
        ValueError,
        "`original_max_position_embeddings` must be at least 1 token, got 0",
    ),
    "N is a float": (
        {"factor": 2, "original_max_position_embeddings": 32.0},
        TypeError,
        "`original_max_position_embeddings` must be a whole number of tokens, got 32.0 of type float",
    ),
    "method is unknown": (
        {"method": "yran", "factor": 2},
        ValueError,
        "Unknown method 'yran'. Did you mean `yarn`\\? Allowed: `.*`pi`, `linear`",
    ),
    "method has another case": ({"method": "YaRN", "factor": 2}, ValueError, "Unknown method 'YaRN'"),
    "method is no text": ({"method": 2, "factor": 2}, TypeError, "`method` must be the name of a method, got 2"),
    "option is unknown": (
        {"method": "yarn", "factor": 2, "beta_fats": 32},
        TypeError,
        "Unknown option of `yarn`: 'beta_fats'. Did you mean `beta_fast`\\? Allowed: `beta_fast`, `beta_slow`",
    ),
    "option belongs to another method": (
        {"factor": 2, "beta_fast": 32},
        TypeError,
        "Unknown option of `pi`: 'beta_fast'. Allowed: none",
    ),
    "option is missing": (
        {"method": "longrope", "factor": 2},
        TypeError,
        "`longrope` needs `long_factor`, for example",
    ),
    "theta is missing": ({"method": "abf", "factor": 2}, TypeError, "`abf` needs `rope_theta`, for example"),
    "theta is 0": (
        {"method": "abf", "factor": 2, "rope_theta": 0},
        ValueError,
        "`rope_theta` must be a finite number > 0, got 0",
    ),
    "theta is text": (
        {"method": "abf", "factor": 2, "rope_theta": "1e6"},
        TypeError,
        "`rope_theta` must be .* got '1e6'",
    ),
    "layers is unknown": (
        {"factor": 2, "layers": "sliding"},
        ValueError,
        "Unknown value of `layers`: 'sliding'. Allowed: `full`, `all`",
    ),
    "layers is a list": ({"factor": 2, "layers": ["full"]}, ValueError, "Allowed: `full`, `all`"),
    "list is too short": (
        {"method": "longrope", "factor": 2, "long_factor": ramp(7)},
        ValueError,
        "`long_factor` " + EIGHT + "7",
    ),
    "list is of the head's width": (
        {"method": "longrope", "factor": 2, "long_factor": ramp(16)},
        ValueError,
        "`long_factor` " + EIGHT + "16",
    ),
    "list has a zero": (
        {"method": "longrope", "factor": 2, "long_factor": [0.0, *ramp(7)]},
        ValueError,
        "`long_factor` must be a finite number > 0, got 0.0",
    ),
    "short list too short": (
        {"method": "longrope", "factor": 2, "long_factor": ramp(8), "short_factor": [1.0] * 7},
        ValueError,
        "`short_factor` must have 8 values",
    ),
    "beta_fast below beta_slow": (
        {"method": "yarn", "factor": 2, "beta_fast": 1, "beta_slow": 2},
        ValueError,
        "`beta_fast` must be above `beta_slow`, got 1 and 2. Published: 32 and 1",
    ),
    "beta_fast is another word": (
        {"method": "yarn", "factor": 2, "beta_fast": "fast"},
        ValueError,
        "Unknown value of `beta_fast`: 'fast'. Allowed: `auto`",
    ),
    "ramp is unknown": (
        {"method": "yarn", "factor": 2, "ramp": "rotation"},
        ValueError,
        "Unknown value of `ramp`: 'rotation'. Did you mean `rotations`",
    ),
    "temperature is unknown": (
        {"method": "yarn", "factor": 2, "temperature": "softmax"},
        ValueError,
        "Unknown value of `temperature`: 'softmax'.* Allowed: `cos_sin`, `logits`",
    ),
    "truncate is a number": (
        {"method": "yarn", "factor": 2, "truncate": 1},
        TypeError,
        "`truncate` must be True or False, got 1",
    ),
    "attention_factor is 0": (
        {"method": "yarn", "factor": 2, "attention_factor": 0},
        ValueError,
        "`attention_factor` must be a finite number > 0, got 0",
    ),
    "attention_factor is nan": (
        {"method": "longrope", "factor": 2, "long_factor": ramp(8), "attention_factor": NAN},
        ValueError,
        "`attention_factor` must be a finite number > 0, got nan",
    ),
    "high_freq_factor below low_freq_factor": (
        {"method": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 1},
        ValueError,
        "`high_freq_factor` must be above `low_freq_factor`, got 1 and 4",
    ),
}
"""What is wrong -> arguments, error and what its message says."""


@pytest.mark.parametrize(("arguments", "error", "message"), BAD.values(), ids=BAD)
def test_a_bad_argument_is_named_with_the_next_step_and_nothing_is_touched(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = tiny_model("llama")
    before = snapshot(model, 0)
    with pytest.raises(error, match=message):
        patch_model(model, **{"method": "pi", **arguments})
    assert differences(before, snapshot(model, 0)) == []
    assert record_of(model) is None


GOOD: dict[str, dict[str, Any]] = {
    "int": {"factor": 2},
    "float": {"factor": 2.0},
    "numpy float": {"factor": np.float64(2)},
    "numpy int": {"factor": np.int64(2)},
    "target": {"target_length": 64},
    "numpy target": {"target_length": np.int64(64)},
    "N and factor": {"factor": 2, "original_max_position_embeddings": 32},
}


@pytest.mark.parametrize("arguments", GOOD.values(), ids=GOOD)
def test_every_way_to_say_twice_is_the_same_patch(arguments: dict[str, Any]) -> None:
    record = record_of(patch_model(tiny_model("llama"), "pi", **arguments))
    assert (record.factor, type(record.factor), record.target_length, type(record.target_length)) == (
        2.0,
        float,
        64,
        int,
    )


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))], ids=["linear", "sequential"])
@pytest.mark.parametrize("call", [patch_model, inspect_model])
def test_something_that_is_no_transformers_model_is_named(call: Callable[..., Any], model: nn.Module) -> None:
    arguments = ("pi", 2) if call is patch_model else ()
    with pytest.raises(TypeError, match=f"`model` must be .* a transformers model, got {type(model).__name__}"):
        call(model, *arguments)


def test_a_model_inside_another_module_is_found() -> None:
    wrapped = nn.Sequential(tiny_model("llama"))
    assert patch_model(wrapped, "pi", 2) is wrapped
    assert record_of(wrapped).sites == ["model.rotary_emb"]


@pytest.mark.parametrize("method", ["pi", "yarn"])
def test_a_model_without_a_known_encoding_is_told_what_was_looked_at(method: str) -> None:
    model = special_models.mamba()
    before = snapshot(model, 0)
    with pytest.raises(
        NoSiteError, match=r"MambaForCausalLM has no position encoding that is known. Looked at: "
    ) as error:
        patch_model(model, method, 2)
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, PatchError)
    assert differences(before, snapshot(model, 0)) == []


def test_a_config_without_a_length_asks_for_it() -> None:
    model = tiny_model("llama")
    del model.config.max_position_embeddings
    with pytest.raises(
        ValueError, match=r"LlamaConfig has none of the length fields.*`original_max_position_embeddings`"
    ):
        patch_model(model, "pi", 2)
    patch_model(model, "pi", 2, original_max_position_embeddings=32)
    assert record_of(model).target_length == 64


def test_a_ramp_on_a_single_channel_is_refused_with_another_method() -> None:
    model = special_models.build(
        "AutoModelForCausalLM",
        "gpt_neox",
        {
            "vocab_size": 99,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.125},
        },
    )
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"at least 4 rotated channels, this model has 2. Use `pi`"):
        patch_model(model, "ntk", 2)
    with pytest.raises(ValueError, match=r"at least two rotating channels, this spectrum has 1. Use `pi`"):
        patch_model(model, "yarn", 2)
    assert differences(before, snapshot(model)) == []


def test_a_table_that_is_too_short_for_the_input_still_says_so() -> None:
    """Beyond T a finite table ends, patched or not: torch's own error, no wrong numbers."""
    model = patch_model(tiny_model("gptj"), "pi", 2)
    model(**tiny_inputs(64))
    with pytest.raises((IndexError, RuntimeError)):
        model(**tiny_inputs(65))
