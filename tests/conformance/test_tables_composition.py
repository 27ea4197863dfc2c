"""Patches of tables on top of one another: what the rows are then, and that all of them come off at once."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from hf_posext import PatchError, patch_model, patched, probe, record_of, suspended, unpatch_model
from tests.dynamic import text
from tests.snapshots import differences, snapshot
from tests.tables import (
    FAMILIES,
    KINDS,
    N,
    T,
    loss_of,
    make,
    patch,
    patched_model,
    read,
    shared_model,
    shared_unpatched,
    tables_of,
)

ROWS = ("roberta", "gpt2", "bart")
STATIC = [kind for kind in KINDS if kind != "pi_dynamic"]
TWO_KINDS = [(first, STATIC[(index + step) % len(STATIC)]) for step in (0, 3) for index, first in enumerate(STATIC)]
"""Every kind first and second, on itself and on another."""


def composed(row: str, *methods: str, **options: Any) -> Any:
    """A model patched by 2 with one method after the other."""
    model = make(row)
    for method in methods:
        patch_model(model, method, 2, compose=True, **options)
    return model


def positions_of(model: Any, row: str) -> list[Tensor]:
    """Its tables without reserved rows."""
    return [table[FAMILIES[row].reserved :] for table in tables_of(model)]


@pytest.mark.parametrize("row", ROWS)
def test_tile_on_tile_is_tile_by_4(row: str) -> None:
    found, expected = composed(row, "tile", "tile"), patch_model(make(row), "tile", 4)
    assert [torch.equal(*each) for each in zip(tables_of(found), tables_of(expected), strict=True)] == [True] * len(
        FAMILIES[row].tables
    )
    assert torch.equal(read(found, text(2 * T)), read(expected, text(2 * T)))


@pytest.mark.parametrize("row", ROWS)
def test_pi_on_pi_is_pi_by_4(row: str) -> None:
    found, expected = composed(row, "pi", "pi"), patch_model(make(row), "pi", 4)
    for one, other, old in zip(
        positions_of(found, row), positions_of(expected, row), positions_of(shared_unpatched(row), row), strict=True
    ):
        assert torch.equal(one[::4], old)
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("row", ROWS)
def test_tile_on_pi_repeats_the_stretched_table(row: str) -> None:
    for found, stretched in zip(
        positions_of(composed(row, "pi", "tile"), row), positions_of(shared_model(row, "pi"), row), strict=True
    ):
        assert torch.equal(found, torch.cat((stretched, stretched)))


@pytest.mark.parametrize("row", ["xglm", "m2m_100"])
def test_pi_on_longer_sinusoids_is_the_formula_at_half_the_places(row: str) -> None:
    model, reserved = composed(row, "sinusoidal", "pi"), FAMILIES[row].reserved
    (one, *_) = tables_of(model)
    places = torch.arange(2 * T, dtype=torch.float64)[:, None] / 2 + reserved
    angles = places * 10_000.0 ** (-torch.arange(32, dtype=torch.float64) / 31)
    expected = torch.cat((angles.sin(), angles.cos()), 1)
    torch.testing.assert_close(one[reserved:].double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("first", "second"), TWO_KINDS)
def test_every_composition_reads_4_n_tokens_with_its_own_rows_and_comes_off(first: str, second: str) -> None:
    model = make("roberta")
    before = snapshot(model, 0)
    patch(model, first)
    once = positions_of(model, "roberta")[0]
    patch(model, second, compose=True)
    assert (record_of(model).factor, record_of(model).total_factor) == (2, 4)
    assert read(model, text(2 * T)).isfinite().all()
    (rows,) = positions_of(model, "roberta")
    assert len(rows) == 2 * T
    if second in ("tile", "tile_frozen", "hierarchical"):
        assert torch.equal(rows[:T], once)
    elif second in ("pi", "pi_cubic", "pi_frozen"):
        assert torch.equal(rows[::2], once)
    assert differences(before, snapshot(unpatch_model(model), 0)) == []


def test_frozen_rows_of_the_second_patch_are_those_that_it_found() -> None:
    model = patch(patched_model("gpt2", "tile"), "tile_frozen", compose=True)
    before = model.state_dict()["transformer.wpe.weight"].clone()
    train(model)
    now = model.state_dict()["transformer.wpe.weight"]
    assert torch.equal(now[:T], before[:T])
    assert (now[T:] != before[T:]).any(-1).all()


def test_rows_that_only_the_first_patch_froze_are_trained_after_the_second() -> None:
    model = patch(patched_model("gpt2", "tile_frozen"), "tile", compose=True)
    before = model.state_dict()["transformer.wpe.weight"].clone()
    train(model)
    assert (model.state_dict()["transformer.wpe.weight"] != before).any(-1).all()


def train(model: Any) -> None:
    """One step of an optimizer with weight decay, on text of 4 N tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    loss_of(model, 2 * T).backward()
    optimizer.step()


@pytest.mark.parametrize("kind", ["tile", "pi_dynamic"])
def test_a_second_patch_needs_compose(kind: str) -> None:
    model = patched_model("bert", kind)
    before = snapshot(model, 0)
    with pytest.raises(PatchError, match=r"already patched: .* x2 \(32 -> 64 tokens\)"):
        patch_model(model, "tile", 2)
    assert differences(before, snapshot(model, 0)) == []


def test_nothing_goes_on_top_of_a_table_that_is_chosen_by_length() -> None:
    model = patched_model("bert", "pi_dynamic")
    before = snapshot(model, 0)
    with pytest.raises(PatchError, match="its factor follows the length"):
        patch_model(model, "tile", 2, compose=True)
    assert differences(before, snapshot(model, 0)) == []


@pytest.mark.parametrize("first", ["tile", "tile_frozen", "pi", "sinusoidal"])
def test_a_second_patch_that_fails_leaves_the_first_with_what_was_trained(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = patched_model("gpt2", first)
    if first != "sinusoidal":
        with torch.no_grad():
            model.transformer.wpe.weight[N:] += 1
    before, logits = snapshot(model, 0), read(model, text(T))
    monkeypatch.setattr(probe, "check_effect", Mock(side_effect=[PatchError("refused here"), None]))
    with pytest.raises(PatchError, match="refused here"):
        patch_model(model, "pi", 2, compose=True)
    monkeypatch.undo()
    assert torch.equal(read(model, text(T)), logits)
    assert [each for each in differences(before, snapshot(model, 0)) if "hooks" not in each] == []
    unpatch_model(model)
    assert torch.equal(read(model, text(N)), read(shared_unpatched("gpt2"), text(N)))


def test_a_composition_outlasts_a_look_at_the_unpatched_model() -> None:
    model = composed("roberta", "tile", "pi")
    before = snapshot(model, 0)
    with suspended(model):
        assert torch.equal(read(model, text(N)), read(shared_unpatched("roberta"), text(N)))
    assert [each for each in differences(before, snapshot(model, 0)) if "hooks" not in each] == []  # numbered anew


def test_a_with_block_inside_a_patch_takes_off_both() -> None:
    """`unpatch_model` takes all patches off, so that a block must not be put inside a patch by mistake."""
    model = patched_model("gpt2", "tile")
    with pytest.raises(PatchError, match="already patched"), patched(model, "pi", 2):
        pass
    assert record_of(model).method == "tile"
