"""Native ALiBi of BLOOM, MPT and Falcon: where it is found, divided by a number, switched off, and given back."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_posext
from hf_posext import mechanisms
from hf_posext.contract import DistanceChange
from hf_posext.mechanisms import alibi
from hf_posext.mechanisms._scope import scoped_modules
from tests.architectures import VOCABULARY
from tests.copies import through_pickle, through_torch_save
from tests.dynamic import assert_close, padded, whole
from tests.mechanisms.alibi_models import (
    ALL,
    FAMILIES,
    HEADS,
    SETTINGS,
    SLOPES,
    STATIC,
    N,
    Patch,
    by_patch,
    divided,
    first_bias,
    raised,
    renamed,
    sites,
    slopes_divided,
    spread_out,
    text,
    tiny,
)
from tests.snapshots import differences, snapshot
from tests.special_models import build


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_found_in_every_attention_module_that_is_handed_a_bias(family: str) -> None:
    model = tiny(family)
    found = sites(model)
    modules = [name for name, module in model.named_modules() if type(module).__name__.endswith("Attention")]
    assert [site.name for site in found] == modules
    assert len(found) == 2
    assert {site.mechanism for site in found} == {"alibi"}
    assert all(alibi.in_use(scoped.owner) for scoped in scoped_modules(model))


@pytest.mark.parametrize("model_type", ["falcon", "t5"])
def test_it_is_not_found_where_it_is_switched_off_or_something_else_has_its_name(model_type: str) -> None:
    t5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    if model_type == "t5":
        model = build("AutoModelForSeq2SeqLM", "t5", {**t5, "decoder_start_token_id": 0})
    else:
        model = tiny("falcon", alibi=False)
    assert sites(model) == []
    assert not any(alibi.in_use(scoped.owner) for scoped in scoped_modules(model))


def test_a_class_of_its_own_in_another_module_is_still_known() -> None:
    model = tiny("falcon")
    inner = model.transformer
    inner.__class__ = type("Other", (type(inner),), {"__module__": __name__})
    assert len(sites(model)) == 2


@torch.no_grad()
@pytest.mark.parametrize("patch", STATIC)
@pytest.mark.parametrize("factor", [2.0, 3.3])
@pytest.mark.parametrize("family", list(SETTINGS))
def test_it_reads_as_a_model_with_smaller_slopes(family: str, factor: float, patch: Patch) -> None:
    model, tokens = patch(tiny(family), factor), text(30)
    batch = padded([text(30)[0], text(21, seed=4)[0]], "left")
    plain = raised(tiny(family), factor)
    with slopes_divided(plain, factor):
        one, many = whole(plain, tokens), whole(plain, **renamed(batch))
    kept = batch["attention_mask"].bool()
    assert_close(whole(model, tokens), one, 1e-5)
    assert_close(whole(model, **renamed(batch))[kept], many[kept], 1e-5)
    assert (whole(plain, tokens) - one).abs().max() > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("patch", STATIC)
@pytest.mark.parametrize("family", FAMILIES)
def test_report_103_twice_the_text_and_the_bias_of_half_the_distance(family: str, patch: Patch) -> None:
    """MPT of 16 tokens cannot read 32; a bias at distance d is -m d / 2, in closed form from the ALiBi paper."""
    model, tokens = tiny(family), text(2 * N)
    if family == "mpt":
        with pytest.raises(RuntimeError, match="size of tensor"):
            whole(model, tokens)
    model = patch(model, 2.0)
    assert whole(model, tokens).isfinite().all()
    bias, mask = first_bias(model, tokens)
    distance = torch.arange(2 * N, dtype=torch.float64).flip(0)
    expected = -SLOPES[:, None] * distance / 2
    bias = bias.double().reshape(HEADS, -1)
    torch.testing.assert_close(bias - bias[:, -1:], expected, rtol=0, atol=1e-6)
    if mask is not None:
        last = mask[0, :, -1].double()
        torch.testing.assert_close((last - last[:, -1:]) * math.sqrt(96 // HEADS), expected, rtol=0, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("factor", [2.0, 3.3])
@pytest.mark.parametrize("family", FAMILIES)
def test_report_057_a_half_precision_bias_is_divided_exactly_and_rounded_once(family: str, factor: float) -> None:
    plain, tokens = raised(tiny(family), factor), text(30)
    model = divided(copy.deepcopy(plain), factor).to(torch.bfloat16)
    plain = plain.to(torch.bfloat16)
    for now, before in zip(first_bias(model, tokens), first_bias(plain, tokens), strict=True):
        if now is None:
            continue
        open_ = before > torch.finfo(before.dtype).min / 2
        assert now.dtype == before.dtype
        expected = before[open_].double() / float(torch.tensor(factor, dtype=torch.float32))
        assert torch.equal(now[open_], expected.to(before.dtype))
        assert torch.equal(now[~open_], before[~open_])
    assert whole(model, tokens).isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("patch", STATIC)
def test_slots_that_are_twice_as_far_apart_read_at_half_the_slopes_as_before(patch: Patch) -> None:
    """MPT counts slots, so masked tokens in between stretch all distances, and pi undoes that."""
    tokens = text(N)
    spread, mask = spread_out(tokens)
    expected = whole(tiny("mpt"), tokens)
    plain = whole(raised(tiny("mpt"), 2), spread, attention_mask=mask)[:, ::2]
    assert_close(whole(patch(tiny("mpt"), 2.0), spread, attention_mask=mask)[:, ::2], expected, 1e-5)
    assert (plain - expected).abs().max() > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_switched_off_it_is_zero(family: str) -> None:
    model = tiny(family)
    for site in sites(model):
        assert not mechanisms.is_off(site)
        alibi.write(site, DistanceChange(2.0))
        assert not mechanisms.is_off(site)
        alibi.silence(site, 2 * N)
        assert mechanisms.is_off(site)
    bias, mask = first_bias(model, text(N))
    assert bias.eq(0).all()
    if mask is not None:
        assert mask[..., torch.ones(N, N).tril().bool()].eq(0).all()
        assert mask[..., torch.ones(N, N).triu(1).bool()].lt(-1e30).all()


@pytest.mark.parametrize("change", ["pi", "off"])
@pytest.mark.parametrize("family", FAMILIES)
def test_everything_is_given_back(family: str, change: str) -> None:
    model = raised(tiny(family))
    before = snapshot(model)
    for site in sites(model):
        alibi.write(site, DistanceChange(3.0))
        if change == "off":
            alibi.silence(site, N)
    assert differences(before, snapshot(model)) != []
    for site in sites(model):
        alibi.restore(site)
        alibi.restore(site)
        alibi.reset(model, site)
    assert differences(before, snapshot(model)) == []


@torch.no_grad()
@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_torch_save])
@pytest.mark.parametrize("change", list(ALL))
@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon"])
def test_a_copy_reads_the_same_and_is_its_own(family: str, change: str, duplicate: Callable[[Any], Any]) -> None:
    model, tokens = tiny(family), text()
    ALL[change](model)
    expected = whole(raised(model), tokens)
    twin = duplicate(model)
    assert torch.equal(whole(twin, tokens), expected)
    for site in sites(twin):
        alibi.restore(site)
    assert not torch.equal(whole(twin, tokens), expected)
    assert torch.equal(whole(model, tokens), expected)


@torch.no_grad()
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # BLOOM's own GELU, in the tracer
@pytest.mark.parametrize("family", FAMILIES)
def test_one_pass_compiles_in_one_graph(family: str) -> None:
    model, tokens = ALL["pi"](tiny(family, layers=1)), text(20)
    expected = whole(model, tokens)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(compiled(input_ids=tokens, use_cache=False).logits, expected, 1e-5)


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_patch_is_taken_off_bit_for_bit(family: str, dynamic: bool) -> None:
    model = tiny(family)
    before = snapshot(model)
    by_patch(model, dynamic=dynamic)
    assert [site.mechanism for site in hf_posext.inspect_model(model).sites] == ["alibi"] * 2
    whole(model, text())
    hf_posext.unpatch_model(model)
    assert differences(before, snapshot(model)) == []


def test_a_rotary_module_that_is_never_used_is_no_site() -> None:
    assert "rotary" not in {site.mechanism for site in hf_posext.inspect_model(tiny("falcon")).sites}
    rotating = hf_posext.inspect_model(tiny("falcon", alibi=False)).sites
    assert {site.mechanism for site in rotating} == {"rotary"}
