"""`frozen_rows`: training changes new rows only, whatever the optimizer does, in the forward and in what is saved."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posext import load_pretrained, patch_model, suspended, unpatch_model
from tests.copies import through_pickle
from tests.dynamic import text
from tests.snapshots import differences, snapshot
from tests.tables import FAMILIES, N, T, loss_of, make, patched_model, read, tables_of

CASES = [
    pytest.param("gpt2", "tile", {}, id="gpt2-tile"),
    pytest.param("roberta", "hierarchical", {}, id="roberta-hierarchical"),
    pytest.param("opt", "pi", {}, id="opt-pi"),
    pytest.param("bart", "pi", {"mode": "cubic"}, id="bart-pi_cubic"),
    pytest.param("bert", "pi", {"align": "corners"}, id="bert-pi_corners"),
    pytest.param("gpt2", "pi", {"dynamic": True}, id="gpt2-pi_dynamic"),
]
OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.5, momentum=0.9),
}


def frozen(row: str, method: str, **options: Any) -> Any:
    """A patched model of which training may change new rows only."""
    return patch_model(make(row), method, 2, frozen_rows=True, **options).train()


def old_rows(method: str, options: dict[str, Any]) -> list[int]:
    """Positions whose row is an old one, by hand."""
    if method != "pi":
        return list(range(N))
    return [0, T - 1] if options.get("align") == "corners" else list(range(0, T, 2))


def train(model: Any, optimizer: str = "adamw", steps: int = 2) -> Any:
    """The model after a few steps on long text."""
    chosen = OPTIMIZERS[optimizer](model)
    for _ in range(steps):
        chosen.zero_grad()
        loss_of(model).backward()
        chosen.step()
    return model.eval()


def saved(model: Any, row: str) -> list[Tensor]:
    """Its tables as they would be saved, cloned."""
    state = model.state_dict()
    return [state[f"{path}.weight"].clone() for path in FAMILIES[row].tables]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("row", "method", "options"), CASES)
def test_training_changes_every_new_row_and_no_old_one(
    row: str, method: str, options: dict[str, Any], optimizer: str
) -> None:
    model, family = frozen(row, method, **options), FAMILIES[row]
    before, first = saved(model, row), family.reserved
    old = [place + first for place in old_rows(method, options)]
    new = [place for place in range(first, T + first) if place not in old]
    train(model, optimizer)
    for now, then in zip(saved(model, row), before, strict=True):
        assert torch.equal(now[:first], then[:first])
        assert torch.equal(now[old], then[old])
        assert (now[new] != then[new]).any(-1).all()


@pytest.mark.parametrize(("row", "method", "options"), CASES)
def test_the_gradient_of_old_rows_is_zero_and_that_of_new_ones_is_not(
    row: str, method: str, options: dict[str, Any]
) -> None:
    model, first = frozen(row, method, **options), FAMILIES[row].reserved
    loss_of(model).backward()
    free = patch_model(make(row), method, 2, **options).train()
    loss_of(free).backward()
    old = old_rows(method, options)
    for path in FAMILIES[row].tables:
        gradient, plain = (each.get_submodule(path).weight.grad[first:] for each in (model, free))
        assert torch.equal(gradient[old], torch.zeros_like(gradient[old]))
        rest = [place for place in range(T) if place not in old]
        assert torch.equal(gradient[rest], plain[rest])
        assert (gradient[rest] != 0).any(-1).all()


@pytest.mark.parametrize(("row", "method", "options"), CASES)
def test_rows_that_are_looked_up_after_training_are_those_of_the_state_dict(
    row: str, method: str, options: dict[str, Any]
) -> None:
    model, seen = train(frozen(row, method, **options)), []
    for path in FAMILIES[row].tables:
        model.get_submodule(path).register_forward_hook(lambda _, __, output: seen.append(output))
    read(model, text(T))
    first = FAMILIES[row].reserved
    for found, rows in zip(seen, saved(model, row), strict=True):
        assert torch.equal(found.reshape(T, -1), rows[first:])


@pytest.mark.parametrize("method", ["tile", "hierarchical"])
def test_short_text_is_read_as_before_when_only_the_table_was_trained(method: str) -> None:
    """The published recipe: everything else is left as it is, so that nothing of short text is lost."""
    model = frozen("bert", method)
    expected = read(make("bert"), text(N, 2))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("position_embeddings" in name)
    before = read(model.eval(), text(T))
    train(model.train())
    assert torch.equal(read(model, text(N, 2)), expected)
    assert not torch.equal(read(model, text(T)), before)


@pytest.mark.parametrize(("row", "method", "options"), CASES)
def test_a_trained_model_comes_back_from_disk_with_its_rows(
    row: str, method: str, options: dict[str, Any], tmp_path: Path
) -> None:
    family = FAMILIES[row]
    model = train(frozen(row, method, **options))
    model.save_pretrained(tmp_path)
    loaded = load_pretrained(tmp_path, family.auto_class).eval()
    assert torch.equal(read(loaded, text(T)), read(model, text(T)))
    before = saved(loaded, row)
    train(loaded.train(), steps=1)
    old = [place + family.reserved for place in old_rows(method, options)]
    for then, now in zip(before, saved(loaded, row), strict=True):
        assert torch.equal(now[old], then[old])
        assert not torch.equal(now, then)
    if options.get("align") != "corners":
        for found, expected in zip(tables_of(unpatch_model(loaded)), tables_of(make(row)), strict=True):
            assert torch.equal(found, expected)


def test_plain_transformers_reads_short_text_as_the_original_with_the_weights_that_were_not_frozen(
    tmp_path: Path,
) -> None:
    """What is saved has old rows exact, so that a reader who knows nothing of this package has them too."""
    model = train(frozen("gpt2", "tile"))
    model.save_pretrained(tmp_path)
    plain = FAMILIES["gpt2"].auto_class.from_pretrained(tmp_path).eval()
    assert torch.equal(read(plain, text(T)), read(model, text(T)))
    assert torch.equal(plain.transformer.wpe.weight[:N], make("gpt2").transformer.wpe.weight)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle])
def test_copies_have_their_own_rows_and_freeze_them_too(duplicate: Any) -> None:
    model = frozen("gpt2", "tile")
    copied = duplicate(model)
    before, (expected,) = snapshot(model, 0), saved(model, "gpt2")
    train(copied)
    assert differences(before, snapshot(model, 0)) == []
    (found,) = saved(copied, "gpt2")
    assert torch.equal(found[:N], expected[:N])
    assert not torch.equal(found[N:], expected[N:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_old_rows_are_exact_in_every_dtype(dtype: torch.dtype) -> None:
    model = frozen("gpt2", "tile").to(dtype)
    train(model, "sgd", 1)
    assert torch.equal(saved(model, "gpt2")[0][:N], tables_of(make("gpt2"))[0].to(dtype))


def test_other_weights_that_are_loaded_are_in_force_and_frozen_from_then_on() -> None:
    model = frozen("gpt2", "tile")
    state = {name: value + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    assert torch.equal(model.transformer.wpe(torch.arange(T)), state["transformer.wpe.weight"])
    train(model)
    assert torch.equal(saved(model, "gpt2")[0][:N], state["transformer.wpe.weight"][:N])


@pytest.mark.parametrize("kind", ["tile", "tile_frozen", "pi", "pi_dynamic"])
def test_what_was_trained_outlasts_a_look_at_the_unpatched_model(kind: str) -> None:
    """Evaluation reads with the unpatched model in between; the trained rows must still be there afterwards."""
    model = train(patched_model("gpt2", kind).train())
    expected, before = read(model, text(T)), saved(model, "gpt2")
    with suspended(model):
        assert torch.equal(saved(model, "gpt2")[0], tables_of(make("gpt2"))[0])
    assert torch.equal(saved(model, "gpt2")[0], before[0])
    assert torch.equal(read(model, text(T)), expected)


def test_rows_that_are_not_frozen_are_all_trained() -> None:
    model = patched_model("gpt2", "tile").train()
    (before,) = saved(model, "gpt2")
    train(model)
    assert (saved(model, "gpt2")[0] != before).any(-1).all()
