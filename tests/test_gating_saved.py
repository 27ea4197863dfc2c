"""Gated adapters on disk and under the compiler."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from hf_posext import PatchError, load_pretrained, patch_model, record_of, write_record
from hf_posext.gating import gate_adapter, is_gated, ungate_adapter
from tests import tables
from tests.architectures import tiny_model
from tests.dynamic import assert_close, padded, text
from tests.gated import CASES, adapted, gated, read

LONG = 48


def saved(row: str, adapter: str, folder: Path, *, is_gated: bool = True) -> Any:
    """A gated model whose base and adapter are on disk, the record beside the adapter."""
    case = CASES[row]
    case.make().save_pretrained(folder / "base")
    base = type(case.make()).from_pretrained(folder / "base")
    patch_model(base, case.method, 4, dynamic=True)
    model = adapted(case, adapter, base)
    if is_gated:
        gate_adapter(model)
    model.save_pretrained(folder / "adapter")
    write_record(model, folder / "adapter")
    return model


LOADS = """
import sys, torch, transformers
from hf_posext import load_pretrained
from hf_posext.gating import is_gated
model = load_pretrained(sys.argv[1], getattr(transformers, sys.argv[2])).eval()
assert is_gated(model)
with torch.no_grad():
    torch.save([model(input_ids=torch.load(sys.argv[3])[:, :length]).logits for length in (20, 48)], sys.argv[4])
"""


@pytest.mark.parametrize(
    ("row", "adapter", "auto_class"),
    [("llama", "head", "AutoModelForCausalLM"), ("bert", "whole", "AutoModelForMaskedLM")],
)
def test_a_saved_adapter_is_gated_in_another_process(row: str, adapter: str, auto_class: str, tmp_path: Path) -> None:
    model, tokens = saved(row, adapter, tmp_path), text(LONG, 2)
    torch.save(tokens, tmp_path / "tokens.pt")
    arguments = [tmp_path / "adapter", auto_class, tmp_path / "tokens.pt", tmp_path / "logits.pt"]
    subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::FutureWarning", "-c", LOADS, *map(str, arguments)], check=True
    )
    short, long = torch.load(tmp_path / "logits.pt")
    assert torch.equal(short, read(CASES[row].make(), tokens[:, :20]))
    expected = read(model, tokens)
    assert (long - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_the_record_says_whether_the_adapter_is_gated(tmp_path: Path) -> None:
    model = saved("llama", "lora", tmp_path)
    path = tmp_path / "adapter" / "posext.json"
    assert json.loads(path.read_text())["only_beyond_trained_length"] is True
    loaded = load_pretrained(tmp_path / "adapter").eval()
    assert record_of(loaded) == record_of(model)
    assert torch.equal(read(loaded, text(LONG, 2)), read(model, text(LONG, 2)))
    write_record(ungate_adapter(model), tmp_path / "adapter")
    assert "only_beyond_trained_length" not in json.loads(path.read_text())
    assert not is_gated(load_pretrained(tmp_path / "adapter"))


def test_report_064_a_base_that_is_patched_otherwise_is_refused(tmp_path: Path) -> None:
    saved("llama", "lora", tmp_path)
    patch_model(tiny_model("llama"), "pi", 2).save_pretrained(tmp_path / "base")
    with pytest.raises(PatchError, match="Load the adapter on the base that it was trained on"):
        load_pretrained(tmp_path / "adapter")


@pytest.mark.parametrize("named", [None, "", "missing"])
def test_an_adapter_that_names_no_base_is_given_one(named: str | None, tmp_path: Path) -> None:
    model = saved("llama", "lora", tmp_path)
    path = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text())
    config["base_model_name_or_path"] = named
    if named == "missing":
        config.pop("base_model_name_or_path")
    path.write_text(json.dumps(config))
    with pytest.raises(PatchError, match=r"names no base model.*give `base`"):
        load_pretrained(tmp_path / "adapter")
    loaded = load_pretrained(tmp_path / "adapter", base=tmp_path / "base", dtype=torch.bfloat16)
    assert isinstance(loaded, PeftModel)
    assert loaded.get_base_model().dtype is torch.bfloat16
    loaded = load_pretrained(tmp_path / "adapter", base=tmp_path / "base").eval()
    assert_close(read(loaded, text(LONG)), read(model, text(LONG)), 1e-5)


def test_a_base_for_a_model_that_is_no_adapter_is_refused(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"`base` is for the folder of an adapter"):
        load_pretrained(tmp_path, base=tmp_path)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("adapter", ["lora", "whole", "head"])
def test_one_compiled_graph_gives_what_the_model_gives(adapter: str, backend: str) -> None:
    """Not with DoRA: peft 0.21 asks for the name of a class in it, which the compiler refuses without a gate too."""
    model = gated(CASES["llama"], adapter)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    batch = padded([text(20)[0], text(LONG, seed=1)[0]], "left")
    with torch.no_grad():
        assert_close(compiled(**batch, use_cache=False).logits, model(**batch, use_cache=False).logits, 1e-4)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_encoder_gives_what_the_model_gives() -> None:
    model = gated(CASES["bert"], "whole")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    batch = tables.padded([text(20)[0], text(LONG, seed=1)[0]], "right", 0)
    with torch.no_grad():
        assert_close(compiled(**batch).logits, model(**batch).logits, 1e-4)
