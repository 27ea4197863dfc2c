"""Relative biases at divided distances: what was said of a distance d is said of s d, in every family that has one."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hf_posext
from hf_posext.contract import DistanceChange
from hf_posext.mechanisms import relative_bias
from tests.dynamic import cache_name
from tests.mechanisms.relative_models import (
    BUCKETS,
    CLOSE,
    CONVOLVES,
    FAMILIES,
    LENGTH,
    REACH,
    SAYS,
    SEQ2SEQ,
    answer,
    boxes,
    class_of,
    divided,
    inkling,
    of_attention,
    sites,
    text,
    tiny,
)
from tests.snapshots import differences, snapshot

WINDOWED = ("longt5", "longt5_global")
SPREAD = [name for name in FAMILIES if name not in (*WINDOWED, "cpmant")]
"""Families in which a masked token is nothing but a gap: without windows or blocks, and with a mask that has gaps."""
INKLING = ["inkling_text", "inkling2_text"]
FACTORS = [1.2, 1.5, 2, 3]


@pytest.mark.parametrize(("factor", "gap", "old_gap"), [(2, 2, 1), (3, 3, 1), (1.5, 3, 2), (1.2, 6, 5)])
@pytest.mark.parametrize("family", SPREAD)
def test_text_that_is_spread_by_the_factor_is_read_as_before(
    family: str, factor: float, gap: int, old_gap: int
) -> None:
    model = tiny(family)
    before, unpatched = (answer(model, text(), each, keeps_rows=True) for each in (old_gap, gap))
    assert (unpatched - before).abs().max() > 0.05
    divided(model, factor)
    torch.testing.assert_close(answer(model, text(), gap, keeps_rows=True), before, **CLOSE)


def toward_zero(distances: Any, factor: float) -> Any:
    """The whole part of d / s for whole numbers of any shape, where s is the decimal number that was written."""
    shorter = [math.trunc(Fraction(int(each)) / Fraction(str(factor))) for each in np.ravel(distances)]
    return np.reshape(shorter, np.shape(distances))


PLACES = np.arange(LENGTH)
AWAY = PLACES[:, None] - PLACES
"""Query - key."""


@torch.no_grad()
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("family", SAYS)
def test_a_module_says_of_each_distance_what_it_said_of_the_divided_one(family: str, factor: float) -> None:
    model, near = tiny(family), toward_zero(AWAY, factor)
    old = [SAYS[family](site.module).numpy() for site in sites(model)]
    divided(model, factor)
    for site, before in zip(sites(model), old, strict=True):
        expected = before[..., np.maximum(near, 0), np.maximum(-near, 0)]
        np.testing.assert_array_equal(SAYS[family](site.module).numpy(), expected)


def bucket(distance: int, both: bool) -> int:
    """Raffel et al. 2020 (arXiv 1910.10683), sec. 2.1, of key - query: half exact, half logarithmic up to REACH."""
    count = BUCKETS // 2 if both else BUCKETS
    offset = count if both and distance > 0 else 0
    size = abs(distance) if both else max(-distance, 0)
    exact = count // 2
    if size < exact:
        return offset + size
    far = math.floor(math.log(size / exact) / math.log(REACH / exact) * (count - exact))
    return offset + min(exact + far, count - 1)


@torch.no_grad()
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("family", ["t5", "umt5"])
def test_biases_are_those_of_the_paper_at_divided_distances(family: str, factor: float) -> None:
    model = divided(tiny(family), factor)
    for site in sites(model):
        table, both = site.module.relative_attention_bias.weight.numpy(), "encoder" in site.name
        buckets = [bucket(distance, both) for distance in toward_zero(PLACES - 30, factor)]
        np.testing.assert_array_equal(of_attention(site.module)[0, :, 30].numpy(), table[buckets].T)


@torch.no_grad()
def test_sinusoids_of_distances_are_those_of_the_divided_ones() -> None:
    (site,) = sites(divided(tiny("xlnet"), 1.5))
    found = site.module.relative_positional_encoding(LENGTH, LENGTH)[:, 0].numpy()
    distances = np.arange(LENGTH, -LENGTH, -1)[:, None] / 1.5
    angles = distances * 10000.0 ** (-np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(found, np.concatenate((np.sin(angles), np.cos(angles)), axis=1), rtol=0, atol=1e-5)


@torch.no_grad()
@CONVOLVES
@pytest.mark.parametrize("name", INKLING)
def test_a_bias_that_each_query_mixes_is_that_of_divided_distances(name: str) -> None:
    model, places = inkling(name), torch.arange(40)
    states = torch.randn(1, 40, 4, 16) if name == "inkling_text" else torch.randn(1, 40, 64)
    distances = places[:, None] - places
    rest = (places, places) if name == "inkling_text" else (distances, places[None])
    assert [site.label for site in sites(model)] == ["sliding_attention", "full_attention"]
    for site in sites(model):
        before, extent = site.module(states, *rest), site.module.rel_extent
        relative_bias.write(site, DistanceChange(1.5))
        after = site.module(states, *rest)
        for query, key in ((q, k) for q in range(40) for k in range(q + 1)):
            near = int(toward_zero(query - key, 1.5))
            row = after[0, :, query, key]
            expected = before[0, :, query, query - near] if near < extent else torch.zeros_like(row)
            torch.testing.assert_close(row, expected, rtol=0, atol=1e-6)


@torch.no_grad()
def test_distances_to_blocks_are_divided_and_those_in_a_window_are_not() -> None:
    model = tiny("longt5_global")
    module, mask = sites(model)[0].module, torch.ones(1, LENGTH)
    segments = torch.ones(1, LENGTH // 2)
    window = module.compute_bias(4)
    divided(model, 1.5)
    assert torch.equal(module.compute_bias(4), window)
    table, found = module.global_relative_attention_bias.weight, module.compute_side_bias(mask, segments)[0]
    for token, block in np.ndindex(LENGTH, LENGTH // 2):  # a block has two tokens
        expected = table[bucket(toward_zero(block - token // 2, 1.5), both=True)]
        assert torch.equal(found[:, token, block], expected)


def test_a_window_alone_is_a_local_site() -> None:
    local, decoder = sites(tiny("longt5"))
    assert (local.is_local, decoder.is_local) == (True, False)


@torch.no_grad()
@pytest.mark.parametrize("family", ["layoutlmv3", "udop"])
def test_distances_between_boxes_stay(family: str) -> None:
    model = tiny(family)
    places = boxes(model, text(40))

    def says() -> Tensor:
        if family == "layoutlmv3":
            return model.encoder._cal_2d_pos_emb(places)
        return torch.cat([each(torch.ones(2, 40), places) for each in model.encoder.relative_bias.biases[1:]])

    before = says()
    divided(model, 2)
    assert torch.equal(says(), before)


@torch.no_grad()
@pytest.mark.parametrize("family", ["t5", "umt5", "pix2struct", "longt5"])
def test_decoding_with_a_cache_is_one_pass(family: str) -> None:
    model, tokens = divided(tiny(family), 1.5), text(24)
    side = "decoder_input_ids" if FAMILIES[family][0].endswith(SEQ2SEQ) else "input_ids"
    pages = {"encoder_outputs": (model.encoder(tokens)[0],)} if side != "input_ids" else {}
    whole = model(**{side: tokens}, **pages)[0]
    first = {side: tokens[:, :9], "use_cache": True, **pages}
    output = model(**first)
    found = [output[0]]
    for place in range(9, 24):
        cache = {cache_name(model): output[cache_name(model)]}
        output = model(**{**first, side: tokens[:, place : place + 1]}, **cache)
        found.append(output[0])
    torch.testing.assert_close(torch.cat(found, dim=1), whole, **CLOSE)


@pytest.mark.parametrize("name", ["SEWDModel", "WavLMModel", "FunnelModel", "ProphetNetModel", "DebertaModel"])
def test_frames_of_sound_and_what_no_function_of_a_module_makes_are_left_alone(name: str) -> None:
    cls = class_of(name)
    with torch.device("meta"):
        assert sites(cls(cls.config_class())) == []  # the default DeBERTa has absolute positions only


def test_distances_that_a_model_cuts_off_before_are_left_alone() -> None:
    assert sites(tiny("xlnet", clamp_len=5)) == []


@pytest.mark.parametrize("family", ["t5", "umt5", "udop", "mpnet", "layoutlmv3", "deberta", "xlnet"])
def test_pi_divides_distances_together_with_any_learned_rows(family: str) -> None:
    model = tiny(family)
    before, logits = snapshot(model, 0), answer(model, text())
    hf_posext.patch_model(model, "pi", 2, original_max_position_embeddings=32)
    torch.testing.assert_close(answer(model, text(), 2), logits, **CLOSE)
    hf_posext.unpatch_model(model)
    assert differences(before, snapshot(model, 0)) == []
    assert torch.equal(answer(model, text()), logits)
