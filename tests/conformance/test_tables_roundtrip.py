"""Invariant 5 for tables: a longer table is in the weights, plain transformers loads it, and the old rows come back."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posext import PatchError, inspect_model, load_pretrained, patch_model, record_of, unpatch_model
from tests.dynamic import text
from tests.plain_reader import LENGTHS
from tests.snapshots import logits_of
from tests.tables import FAMILIES, LEARNED, N, T, make, named, patch, read, shared_unpatched, tables_of

ROOT = Path(__file__).parents[2]
LATE = "deberta"  # older transformers warn as they import it, which a process of its own would not outlive

STATIC = [
    *(("bert", kind) for kind in ("pi", "pi_cubic", "pi_corners", "pi_frozen", "tile", "hierarchical", "sinusoidal")),
    *((row, kind) for row, kind in zip(LEARNED[1:], ("pi", "tile", "hierarchical", "pi_cubic") * 4, strict=False)),
    ("mpnet", "pi"),
    ("bart", "sinusoidal"),
    ("opt", "tile_frozen"),
    ("pegasus", "pi"),
    ("pegasus", "sinusoidal"),
    ("fsmt", "pi"),
    *((row, kind) for row in ("xglm", "marian", "m2m_100") for kind in ("pi", "sinusoidal")),
]
CASES = named(dict.fromkeys(STATIC))
OWN_CLASS = ("xglm", "marian", "m2m_100")
"""Rows whose table is in no checkpoint: their class computes it as it is made."""


@dataclass(frozen=True)
class Saved:
    """A patched model on disk, and what it gave in memory."""

    folder: Path
    native: str | None
    logits: Tensor
    by_plain_words: dict[int, Tensor]
    keys: tuple[list[str], list[str]]


def native(row: str, kind: str) -> str | None:
    """In what words plain transformers loads a case."""
    if row in OWN_CLASS:
        return "unchanged" if kind == "sinusoidal" else None
    return None if (row, kind) == ("mpnet", "pi") else "weights"


def save(row: str, kind: str, folder: Path) -> Saved:
    """Patches and saves one model."""
    model = make(row)
    keys = list(model.state_dict())
    patch(model, kind).save_pretrained(folder)
    with_ids = {length: logits_of(model, length) for length in LENGTHS} if is_plain((row, kind)) else {}
    logits = read(model, text(T, 2))
    return Saved(folder, record_of(model).native, logits, with_ids, (keys, list(model.state_dict())))


def is_plain(case: tuple[str, str]) -> bool:
    """Whether a process of its own can read it by token ids alone."""
    return native(*case) == "weights" and case[0] in LEARNED and case[0] != LATE


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Saved]:
    """Every case on disk, by row and kind."""
    return {case: save(*case, tmp_path_factory.mktemp("-".join(case))) for case in dict.fromkeys(STATIC)}


@pytest.fixture(scope="module")
def read_plainly(
    saved: dict[tuple[str, str], Saved], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], dict[str, Any]]:
    """What a process without this package makes of all cases that claim to need no more."""
    folder, cases = tmp_path_factory.mktemp("plain"), [case for case in saved if is_plain(case)]
    jobs = [{"folder": str(saved[case].folder), "auto_class": FAMILIES[case[0]].auto_class.__name__} for case in cases]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.plain_reader", folder / "jobs.json", folder / "results.pt"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=True,
    )
    return dict(zip(cases, torch.load(folder / "results.pt"), strict=True))


@pytest.mark.parametrize(("row", "kind"), named(filter(is_plain, dict.fromkeys(STATIC))))
def test_a_process_without_this_package_gives_the_logits_of_the_patched_model(
    row: str, kind: str, saved: dict[tuple[str, str], Saved], read_plainly: dict[tuple[str, str], dict[str, Any]]
) -> None:
    found, expected = read_plainly[row, kind], saved[row, kind].by_plain_words
    assert found["logged"] == []
    for length in LENGTHS:
        torch.testing.assert_close(found["logits"][length], expected[length], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("loader", ["plain", "own"])
@pytest.mark.parametrize(("row", "kind"), CASES)
def test_a_loaded_model_has_the_logits_and_its_old_rows_come_back(
    row: str, kind: str, loader: str, saved: dict[tuple[str, str], Saved]
) -> None:
    """No size mismatch and no newly initialised row: transformers would log either, and that fails a test."""
    case, family = saved[row, kind], FAMILIES[row]
    if loader == "plain":
        loaded = family.auto_class.from_pretrained(case.folder).eval()
    else:
        loaded = load_pretrained(case.folder, family.auto_class).eval()
        assert inspect_model(loaded).in_force is True
        with pytest.raises(ValueError, match=f"{T}"):
            read(loaded, text(T + 1))
    assert case.native == native(row, kind)
    assert case.keys[0] == case.keys[1]
    if case.native is not None or loader == "own":
        off = (read(loaded, text(T, 2)) - case.logits).abs().max()
        computes = row in OWN_CLASS and loader == "plain"  # its class, in float32
        assert off <= (1e-5 * case.logits.abs().max() if computes else 0)
    if kind == "sinusoidal" and row in LEARNED:  # the old weights are nowhere
        with pytest.raises(PatchError, match=r"are not in the checkpoint"):
            unpatch_model(loaded)
        assert record_of(loaded).method == "sinusoidal"
        assert torch.equal(read(loaded, text(T, 2)), case.logits)
    else:
        check_unpatched(unpatch_model(loaded), row, exact=kind != "pi_corners")


def check_unpatched(model: Any, row: str, exact: bool) -> None:
    """Demands that a model is what it was before it was patched and saved."""
    plain = shared_unpatched(row)
    assert record_of(model) is None
    assert model.config.max_position_embeddings == plain.config.max_position_embeddings
    for found, expected in zip(tables_of(model), tables_of(plain), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0 if exact else 1e-6)
    if exact:
        assert torch.equal(read(model, text(N, 2)), read(plain, text(N, 2)))


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize(("row", "factor"), [("roberta", 1.5), ("opt", 2.3), ("bart", 3.7), ("bert", 1.1)])
def test_a_broken_factor_gives_the_old_rows_back_but_for_rounding(
    row: str, factor: float, mode: str, tmp_path: Path
) -> None:
    model = patch_model(make(row), "pi", factor, mode=mode)
    model.save_pretrained(tmp_path)
    loaded = load_pretrained(tmp_path, FAMILIES[row].auto_class).eval()
    assert torch.equal(read(loaded, text(N, 2)), read(model, text(N, 2)))
    check_unpatched(unpatch_model(loaded), row, exact=False)


@pytest.mark.parametrize(("row", "factor"), [("fsmt", 1.5), ("pegasus", 2.5), ("marian", 1.5), ("xglm", 2.5)])
def test_a_broken_factor_on_a_formula_gives_the_old_rows_back_or_says_that_it_cannot(
    row: str, factor: float, tmp_path: Path
) -> None:
    model = patch_model(make(row), "pi", factor)
    model.save_pretrained(tmp_path)
    loaded = load_pretrained(tmp_path, FAMILIES[row].auto_class).eval()
    assert torch.equal(read(loaded, text(N, 2)), read(model, text(N, 2)))
    if row not in OWN_CLASS:
        with pytest.raises(PatchError, match=r"are not in the checkpoint"):
            unpatch_model(loaded)
        assert torch.equal(read(loaded, text(N, 2)), read(model, text(N, 2)))
        return
    check_unpatched(unpatch_model(loaded), row, exact=True)


@pytest.mark.parametrize("steps", [("tile", "tile"), ("pi", "pi"), ("pi", "hierarchical"), ("hierarchical", "tile")])
@pytest.mark.parametrize("row", ["roberta", "bart"])
def test_a_composition_comes_back_and_is_taken_off(row: str, steps: tuple[str, str], tmp_path: Path) -> None:
    model = make(row)
    for method in steps:
        patch_model(model, method, 2, compose=True)
    expected = read(model, text(2 * T))
    model.save_pretrained(tmp_path)
    loaded = load_pretrained(tmp_path, FAMILIES[row].auto_class).eval()
    assert record_of(loaded) == record_of(model)
    assert torch.equal(read(loaded, text(2 * T)), expected)
    check_unpatched(unpatch_model(loaded), row, exact=True)


@pytest.mark.parametrize("kind", ["tile", "hierarchical", "pi"])
def test_rows_that_were_trained_after_the_patch_are_loaded_as_they_are(kind: str, tmp_path: Path) -> None:
    model = patch(make("gpt2"), kind)
    with torch.no_grad():
        model.transformer.wpe.weight += torch.randn(T, 64) / 10
    model.save_pretrained(tmp_path)
    loaded = load_pretrained(tmp_path).eval()
    assert torch.equal(read(loaded, text(T)), read(model, text(T)))
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(read(load_pretrained(tmp_path / "again").eval(), text(T)), read(model, text(T)))
    old = tables_of(unpatch_model(loaded))[0]
    assert torch.equal(old, tables_of(model)[0][:: 2 if kind == "pi" else 1][:N])


@pytest.mark.parametrize(("row", "kind"), named([("bert", "tile"), ("opt", "pi"), ("bart", "hierarchical")]))
def test_half_precision_is_loaded_as_it_was_patched(row: str, kind: str, tmp_path: Path) -> None:
    half = make(row).bfloat16()
    before = tables_of(half)
    patch(half, kind).save_pretrained(tmp_path)
    plain = FAMILIES[row].auto_class.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    assert torch.equal(read(plain, text(T)), read(half, text(T)))
    assert [torch.equal(*each) for each in zip(tables_of(unpatch_model(plain)), before, strict=True)] == [True] * len(
        before
    )


def test_shards_load_as_one_file_does(tmp_path: Path) -> None:
    model = patch(make("bert"), "pi_dynamic")
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = load_pretrained(tmp_path, FAMILIES["bert"].auto_class).eval()
    assert torch.equal(read(loaded, text(T)), read(model, text(T)))
    assert torch.equal(read(loaded, text(N)), read(shared_unpatched("bert"), text(N)))


def test_saving_again_after_loading_changes_nothing(tmp_path: Path) -> None:
    patch(make("roberta"), "pi").save_pretrained(tmp_path / "first")
    load_pretrained(tmp_path / "first", FAMILIES["roberta"].auto_class).save_pretrained(tmp_path / "second")
    first, second = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("first", "second"))
    assert first == second
    assert (first["max_position_embeddings"], type(first["max_position_embeddings"])) == (T + 2, int)
