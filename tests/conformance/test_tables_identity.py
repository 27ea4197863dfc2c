"""Invariants 1, 3, 4, 10 and 12 for tables of positions: no bit at factor 1, all given back, one model alone."""

from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posext import NoSiteError, PatchError, inspect_model, patch_model, patched, record_of, unpatch_model
from tests.dynamic import text
from tests.snapshots import described, differences, snapshot
from tests.tables import (
    EVERY_CASE,
    EVERY_PAIR,
    FAMILIES,
    FEW,
    LEARNED,
    SINUSOIDAL,
    N,
    T,
    keeps_short,
    make,
    named,
    patch,
    patched_model,
    read,
    shared_model,
    shared_unpatched,
    tables_of,
)


@pytest.mark.parametrize(("row", "kind"), FEW)
def test_factor_1_changes_no_bit(row: str, kind: str) -> None:
    model = make(row)
    before = snapshot(model, 0)
    patch(model, kind, 1)
    assert torch.equal(read(model, text(N, 2)), read(shared_unpatched(row), text(N, 2)))
    assert record_of(model).native == "unchanged"
    assert differences(before, snapshot(unpatch_model(model), 0)) == []


@pytest.mark.parametrize(("row", "kind"), EVERY_CASE)
def test_every_family_reads_2_n_tokens_gives_all_back_and_keeps_short_text_where_it_says_so(
    row: str, kind: str
) -> None:
    model = make(row)
    before, short = snapshot(model, 0), text(N, 2)
    patch(model, kind)
    expected = read(shared_unpatched(row), short)
    if keeps_short(row, kind):
        assert torch.equal(read(model, short), expected)
    else:
        assert (read(model, short) - expected).abs().max() > 0.01 * expected.abs().max()
    longest = read(model, text(T, 2))
    assert longest.shape[1] == T
    assert longest.isfinite().all()
    assert unpatch_model(model) is model
    assert differences(before, snapshot(model, 0)) == []
    assert torch.equal(read(model, short), expected)


@pytest.mark.parametrize("row", list(FAMILIES))
def test_one_token_more_than_2_n_is_refused_with_the_number(row: str) -> None:
    kind = "tile" if row in LEARNED else "pi"
    with pytest.raises(ValueError, match=rf"(has {T + 1} tokens.*reads {T} at most|is {T - 1} \({T} tokens\)).*factor"):
        read(shared_model(row, kind), text(T + 1))


@pytest.mark.parametrize("row", [row for row in FAMILIES if FAMILIES[row].kind == "decoder"])
def test_a_longer_model_is_causal_to_its_end(row: str) -> None:
    """GPT-Neo keeps a mask of N x N in each layer, which has to grow too; its second layer sees a window of 8."""
    model = shared_model(row, "tile" if row in LEARNED else "pi")
    one, other = text(T), text(T)
    other[0, -1] = 5 + (int(other[0, -1]) - 4) % 90
    found, changed = read(model, one), read(model, other)
    assert torch.equal(found[:, :-1], changed[:, :-1])
    assert not torch.equal(found[:, -1], changed[:, -1])


@pytest.mark.parametrize("distance", [7, 8, N])
def test_the_window_of_gpt_neo_is_as_wide_as_before(distance: int) -> None:
    """One local layer with a window of 8 alone: the last of 2 N tokens sees itself and 7 before it."""
    model = patch(make("gpt_neo", attention_types=[[["local"], 1]], num_layers=1), "tile")
    one, other = text(T), text(T)
    other[0, -1 - distance] = 5 + (int(other[0, -1 - distance]) - 4) % 90
    assert torch.equal(read(model, one)[:, -1], read(model, other)[:, -1]) == (distance >= 8)


@pytest.mark.parametrize(("row", "kind"), FEW)
def test_a_model_built_from_the_same_config_object_keeps_every_bit(row: str, kind: str) -> None:
    kind_of_model, config = type(shared_unpatched(row)), make(row).config
    model, other = kind_of_model(config).eval(), kind_of_model(config).eval()
    words, before = described(config), snapshot(other, 0)
    classes = {each for module in model.modules() for each in type(module).__mro__}
    attributes = {each: dict(vars(each)) for each in classes}
    patch(model, kind)
    read(model, text(T))
    assert [each.__name__ for each in classes if dict(vars(each)) != attributes[each]] == []
    assert differences(before, snapshot(other, 0)) == []
    assert described(config) == words


@pytest.mark.parametrize("row", ["bert", "opt", "bart", "m2m_100"])
def test_classes_are_those_of_the_model(row: str) -> None:
    """What asks for `OPTLearnedPositionalEmbedding` and the like must still find it."""
    model = shared_model(row, "pi")
    for path in FAMILIES[row].tables:
        module, before = model.get_submodule(path), shared_unpatched(row).get_submodule(path)
        assert isinstance(module, type(before))
        assert type(module).__name__ == type(before).__name__


@pytest.mark.parametrize(("row", "kind"), named([("bert", "sinusoidal"), ("opt", "pi"), ("bart", "pi_dynamic")]))
def test_a_with_block_gives_all_back_after_an_error(row: str, kind: str) -> None:
    model = make(row)
    before = snapshot(model, 0)
    with pytest.raises(ZeroDivisionError), patched(model, "tile", 2):
        raise ZeroDivisionError
    patch(model, kind)
    patch(unpatch_model(model), kind)
    unpatch_model(model)
    assert differences(before, snapshot(model, 0)) == []


def frozen_output(module: Any) -> None:
    """Makes a module give out what it gave at first, whatever its rows are by now."""
    rows = module.weight.detach().clone()
    module.forward = MethodType(lambda self, places: torch.nn.functional.embedding(places % len(rows), rows), module)


@pytest.mark.parametrize("kind", ["pi", "pi_dynamic", "sinusoidal"])
def test_a_patch_without_effect_is_an_error_and_is_undone(kind: str) -> None:
    model = make("bert")
    frozen_output(model.bert.embeddings.position_embeddings)
    before = snapshot(model, 0)
    with pytest.raises(PatchError, match="no effect"):
        patch(model, kind)
    assert differences(before, snapshot(model, 0)) == []
    assert record_of(model) is None


@pytest.mark.parametrize("kind", ["tile", "hierarchical", "pi_dynamic"])
def test_a_model_that_cannot_read_so_much_for_another_reason_is_left_as_it_was(kind: str) -> None:
    model = make("gpt2")
    inner = model.transformer.h[1].forward

    def ends(self: Any, hidden: Tensor, *rest: Any, **named: Any) -> Any:
        if "position_ids" in named and named["position_ids"] is not None and int(named["position_ids"].max()) >= N:
            raise IndexError("a table of its own")
        return inner(hidden, *rest, **named)

    model.transformer.h[1].forward = MethodType(ends, model.transformer.h[1])
    before = snapshot(model, 0)
    with pytest.raises(PatchError, match=f"cannot read {T} tokens"):
        patch(model, kind)
    assert differences(before, snapshot(model, 0)) == []


@pytest.mark.parametrize("row", LEARNED)
def test_methods_for_frequencies_are_refused_with_those_that_apply(row: str) -> None:
    with pytest.raises(NoSiteError, match=r"`yarn` has no meaning.*`pi`.*`tile`"):
        patch_model(make(row), "yarn", 2)


@pytest.mark.parametrize("row", SINUSOIDAL)
@pytest.mark.parametrize("method", ["tile", "hierarchical"])
def test_methods_for_weights_are_refused_on_formulae(row: str, method: str) -> None:
    with pytest.raises(NoSiteError, match=f"`{method}` has no meaning for a sinusoidal encoding.*`sinusoidal`.*`pi`"):
        patch_model(make(row), method, 2)


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("pi", {"mode": "nearest"}, "mode"),
        ("pi", {"align": "middle"}, "align"),
        ("pi", {"frozen_rows": 1}, "frozen_rows"),
        ("hierarchical", {"alpha": 0.5}, "alpha"),
        ("tile", {"dynamic": True}, "does not move the positions of short text"),
        ("hierarchical", {"dynamic": True}, "does not move the positions of short text"),
        ("sinusoidal", {"dynamic": True}, "dynamic"),
        ("tile", {"mode": "linear"}, "mode"),
        ("tile", {"original_max_position_embeddings": N + 1}, f"at most {N}"),
    ],
)
def test_options_without_a_meaning_are_refused_and_nothing_is_changed(
    method: str, options: dict[str, Any], words: str
) -> None:
    model = make("bert")
    before = snapshot(model, 0)
    with pytest.raises((TypeError, ValueError), match=words):
        patch_model(model, method, 2, **options)
    assert differences(before, snapshot(model, 0)) == []


@pytest.mark.parametrize(("row", "kind"), named(pair for pair in EVERY_PAIR if pair[1] == "pi"))
def test_lengths_of_config_and_report_are_those_of_the_table(row: str, kind: str) -> None:
    """Usable tokens are rows without reserved ones, which the config of RoBERTa counts and that of OPT does not."""
    model, family = shared_model(row, kind), FAMILIES[row]
    stated, rows = model.config.max_position_embeddings, {len(table) for table in tables_of(model)}
    assert stated == shared_unpatched(row).config.max_position_embeddings + N
    assert rows == {T + family.reserved}
    tables = [model.get_submodule(path) for path in family.tables]
    assert {getattr(table, "num_embeddings", *rows) for table in tables} == rows  # adapters on embeddings ask for it
    assert (record_of(model).trained_length, record_of(model).target_length) == (N, T)
    report = inspect_model(model)
    assert [site.mechanism for site in report.sites][: len(family.tables)] == [family.mechanism] * len(family.tables)
    assert str(T) in str(report)


@pytest.mark.parametrize("target", [N + 1, 40, T - 1])
def test_pi_to_a_length_of_which_hardly_a_position_is_an_old_one(target: int) -> None:
    """With 33 tokens only row 0 is an old one."""
    model = patch_model(make("gpt2"), "pi", target_length=target)
    assert read(model, text(target)).isfinite().all()
    assert not torch.equal(read(model, text(N)), read(shared_unpatched("gpt2"), text(N)))
    with pytest.raises(ValueError, match=f"{target} at most"):
        read(model, text(target + 1))


@pytest.mark.parametrize("given", [N // 2, 20])
def test_a_table_of_which_only_the_first_rows_were_trained(given: int) -> None:
    model = patched_model("bert", "tile", original_max_position_embeddings=given)
    (table,), (old,) = tables_of(model), tables_of(shared_unpatched("bert"))
    assert torch.equal(table[: 2 * given], torch.cat((old[:given], old[:given])))
    assert read(model, text(2 * given)).isfinite().all()
