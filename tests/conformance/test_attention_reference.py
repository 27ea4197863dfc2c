"""Whole models against attention that is written here once more, in float64, pair by pair, as the papers say it.

The reference is the unpatched model without rotation and with an attention function of its own, which turns each pair
of query and key by the distance that the method gives it, and masks as transformers' masks say.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.architectures import TRAINED_LENGTH, tiny_config
from tests.dynamic import TOLERANCE, assert_close, positions, text, whole
from tests.in_attention import BIDIRECTIONAL, ENDS_AT_N, KINDS, TABLES, auto_class, make, named, patch

NAME = "written_in_the_tests"
N = TRAINED_LENGTH


@dataclass
class Naive:
    """What one attention module of the reference does.

    Attributes:
        places: [B, L] positions.
        angles: [F] radians per token of its channel pairs, in halves as Llama has them; empty for no rotation.
        apart: mapped distance [B, L, L] of places [B, L].
        slopes: [H] of a linear bias, or None.
        hidden: whether a pair is not seen, [B, L, L] of places; on top of the mask.
        grown: factor of the logits of each query, [B, L] of places.
    """

    places: Tensor
    angles: Tensor
    apart: Callable[[Tensor], Tensor]
    slopes: Tensor | None = None
    hidden: Callable[[Tensor], Tensor] | None = None
    grown: Callable[[Tensor], Tensor] | None = None

    def logits(self, query: Tensor, key: Tensor, scale: float) -> Tensor:
        """[B, H, L, S] for heads [B, H, L, D] that are not rotated."""
        pairs, apart = len(self.angles), self.apart(self.places)
        real, imaginary = query[..., :pairs], query[..., pairs : 2 * pairs]
        real_key, imaginary_key = key[..., :pairs], key[..., pairs : 2 * pairs]
        angle = apart[:, None, :, :, None] * self.angles
        real, imaginary = real[..., :, None, :], imaginary[..., :, None, :]
        real_key, imaginary_key = real_key[..., None, :, :], imaginary_key[..., None, :, :]
        along = real * real_key + imaginary * imaginary_key
        across = imaginary * real_key - real * imaginary_key
        found = (along * angle.cos() - across * angle.sin()).sum(-1)
        found = scale * (found + query[..., 2 * pairs :] @ key[..., 2 * pairs :].mT)
        if self.grown is not None:
            found = found * self.grown(self.places)[:, None, :, None]
        if self.slopes is not None:
            found = found - self.slopes[:, None, None] * distances(self.places).abs()[:, None]
        return found if self.hidden is None else found.masked_fill(self.hidden(self.places)[:, None], -math.inf)


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    """The attention function of the reference."""
    share = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    logits = module.naive.logits(query, key, options.get("scaling") or query.shape[-1] ** -0.5)
    if mask is not None:
        logits = logits.masked_fill(mask < -1e30, -math.inf)
    weights = (logits - logits.amax(-1, keepdim=True).clamp(min=-1e30)).exp()
    output = weights @ value / weights.sum(-1, keepdim=True).clamp(min=1e-30)
    return output.transpose(1, 2).contiguous(), None


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    """The reference among transformers' attention functions, with the masks of eager attention."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    yield
    for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        del registry._global_mapping[NAME]


def distances(places: Tensor) -> Tensor:
    """d = q - k, [B, L, L]."""
    return places[:, :, None] - places[:, None, :]


def mirrored(places: Tensor, window: int, beyond: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """d up to the window, beyond(q, k) from there on, and the same the other way round for keys behind the query."""
    apart, query, key = distances(places), places[:, :, None], places[:, None, :]
    far = torch.where(apart > 0, beyond(query, key), -beyond(key, query))
    return torch.where(apart.abs() < window, apart, far).double()


def grouped(window: int, group: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """floor(q / G) + W - floor(W / G) - floor(k / G). G an int or [B, L, 1]. SelfExtend, sec. 3."""
    return lambda query, key: query // group + window - window // group - key // group


def leaking(window: int, slope: float) -> Callable[[Tensor, Tensor], Tensor]:
    """W + slope (d - W). Source: Su, kexue.fm/archives/9708, with slope for 1 / k."""
    return lambda query, key: window + slope * (query - key - window).double()


def fitting(length: int, window: int) -> int:
    """The smallest G with which so many tokens are within (N - W) G + W. Source: SelfExtend, sec. 3."""
    group = 1
    while (N - window) * group + window < length:
        group += 1
    return group


def following(window: int, is_causal: bool) -> Callable[[Tensor], Tensor]:
    """Distances where the group follows the text up to each query, or the whole text."""

    def apart(places: Tensor) -> Tensor:
        lengths = places + 1 if is_causal else (places.amax(1, keepdim=True) + 1).expand_as(places)
        sizes = torch.tensor([[fitting(int(length), window) for length in row] for row in lengths])[..., None]
        return mirrored(places, window, grouped(window, sizes))

    return apart


def slopes(heads: int) -> Tensor:
    """2^(-8 i / n) of the lower power of two n, then 2^(-4 (2 i + 1) / n). Source: ALiBi, published code."""
    lower = 2 ** int(math.log2(heads))
    first = [2 ** (-8 * (i + 1) / lower) for i in range(lower)]
    second = [2 ** (-4 * (2 * i + 1) / lower) for i in range(heads - lower)]
    return torch.tensor([*first, *second], dtype=torch.float64)


def outside(width: int, sinks: int) -> Callable[[Tensor], Tensor]:
    """Keys at least `width` away that are not among the first."""
    return lambda places: (distances(places).abs() >= width) & (places >= sinks)[:, None, :]


def naive_of(kind: str, places: Tensor, angles: Tensor, heads: int, is_causal: bool) -> Naive:
    """The formulae of a kind."""
    method, options = KINDS[kind]
    window = options.get("window", 0)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "self_extend": lambda where: mirrored(where, window, grouped(window, options["group_size"])),
        "rerope": lambda where: distances(where).double().clamp(-window, window),
        "leaky_rerope": lambda where: mirrored(
            where, window, lambda q, k: window + options["slope"] * (q - k - window).double()
        ),
    }
    found = Naive(places, angles, ways.get(method, lambda where: distances(where).double()))
    if kind == "self_extend_dynamic":
        found.apart = following(window, is_causal)
    if method in ("alibi", "nope"):
        found.angles = angles[:0]
    if method == "alibi":
        found.slopes = slopes(heads)
    if method == "window":
        found.hidden = outside(options["width"], options.get("sinks", 0))
    if options.get("logn"):
        # max(1, log_N(p + 1)). Source: Su, kexue.fm/archives/8823
        found.grown = lambda where: ((where + 1).double().log() / math.log(N)).clamp(min=1)
    return found


def with_layers(row: str, layers: int) -> Any:
    """The model of a row, or the same with the first layer alone."""
    model = make(row)
    if layers == 1:
        config = tiny_config(row)
        config.num_hidden_layers = 1
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:1]
        state = {name: value for name, value in model.state_dict().items() if "layers.1." not in name}
        model = auto_class(row).from_config(config, dtype=torch.float32).eval()
        model.load_state_dict(state)
    return model


def with_short_angles(model: Any) -> Any:
    """The model with frequencies of eight bits: then transformers' float32 angles are those of float64."""
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            mantissa, exponent = torch.frexp(buffer)
            buffer.copy_(torch.ldexp((mantissa * 256).round() / 256, exponent))
    return model


def with_table(row: str, kind: str, length: int) -> Any:
    """The model of a row whose table is long enough for a text and, unless windows keep it, zero."""
    if KINDS[kind][0] == "window":
        return make(row)
    field = "max_position_embeddings" if row == "bert" else "n_positions"
    model, own = TABLES[row](**{field: length}), make(row).state_dict()
    name = next(name for name in own if name.endswith(("position_embeddings.weight", "wpe.weight")))
    own[name] = torch.zeros_like(model.state_dict()[name])
    model.load_state_dict(own)
    return model


def reference(row: str, kind: str, places: Tensor, layers: int) -> Any:
    """The unpatched model in float64 that reads texts at some places as a kind says."""
    model = with_table(row, kind, places.shape[1]) if row in TABLES else with_layers(row, layers)
    model = with_short_angles(model)
    model.set_attn_implementation(NAME)
    spectra: dict[str, Tensor] = {}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and "original" not in name:
                spectra[name.removesuffix("inv_freq").removesuffix("_")] = buffer.double()
                setattr(module, name, torch.zeros_like(buffer))
    kinds = getattr(model.config, "layer_types", None) if spectra and "" not in spectra else None
    for index, module in enumerate(each for each in model.modules() if hasattr(each, "is_causal")):
        label = kinds[index] if kinds else ""
        angles = spectra.get(label, torch.zeros(0).double())
        if label == "sliding_attention" and KINDS[kind][0] != "window":  # left alone
            module.naive = Naive(places, angles, lambda where: distances(where).double())
        else:
            heads = model.config.num_attention_heads
            module.naive = naive_of(kind, places, angles, heads, row not in BIDIRECTIONAL)
    return model.double()


ALL = tuple(KINDS)
CASES = [(row, kind) for row in ("llama", "modernbert") for kind in ALL]
CASES += [("qwen3", kind) for kind in ("alibi", "self_extend", "window_sinks")]
CASES += [("gpt_neox", kind) for kind in ("alibi", "leaky_rerope", "window")]
CASES += [("gemma3", kind) for kind in ("alibi", "self_extend_uneven", "leaky_rerope", "window")]
CASES += [(row, kind) for row in TABLES for kind in ("alibi", "nope", "window_sinks")]


def places_for(row: str, kind: str) -> Tensor:
    """Positions of a text as long as the table allows, or more than twice N, [1, L]."""
    return torch.arange(N if (row, kind) in ENDS_AT_N else 70)[None]


@pytest.mark.parametrize(("row", "kind"), named(CASES))
def test_a_model_of_two_layers_reads_as_the_formulae_say(row: str, kind: str) -> None:
    places = places_for(row, kind)
    tokens = text(places.shape[1], batch=2)
    found = whole(patch(with_short_angles(make(row)), kind), tokens).double()
    assert_close(found, whole(reference(row, kind, places, 2), tokens))


@pytest.mark.parametrize(
    ("row", "kind"), named([*(("gpt_neox", kind) for kind in ALL), ("llama", "alibi"), ("llama", "self_extend")])
)
def test_a_model_of_one_layer_reads_as_the_formulae_say(row: str, kind: str) -> None:
    tokens, places = text(70, batch=2), places_for(row, kind)
    found = whole(patch(with_short_angles(with_layers(row, 1)), kind), tokens)
    assert_close(found.double(), whole(reference(row, kind, places, 1), tokens))


# nothing of these is computed in float32, by transformers or otherwise
IN_FLOAT64 = [("gpt_neox", "alibi"), ("gpt_neox", "nope"), *((row, "alibi") for row in TABLES)]


@pytest.mark.parametrize(("row", "kind"), named([*IN_FLOAT64, *(("gpt_neox", kind) for kind in ALL[2:])]))
def test_a_model_in_float64_reads_as_the_formulae_say(row: str, kind: str) -> None:
    places = places_for(row, kind)
    tokens = text(places.shape[1], batch=2)
    found = whole(patch(with_short_angles(make(row)), kind).double(), tokens)
    exact = 1e-10 if (row, kind) in IN_FLOAT64 else 1e-5
    assert_close(found, whole(reference(row, kind, places, 2), tokens), exact)


@pytest.mark.parametrize("row", ["llama", "modernbert"])
@pytest.mark.parametrize("kind", ["alibi", "self_extend", "self_extend_dynamic", "leaky_rerope", "window_sinks"])
def test_positions_with_gaps_are_taken_as_they_are(row: str, kind: str) -> None:
    """The mask is given, or transformers would take the gaps for packed texts."""
    gaps = torch.tensor([[1, 1, 3, 1, 1, 2] * 8, [2, 1, 1, 5, 1, 1] * 8])
    places, tokens = gaps.cumsum(1) - gaps[:, :1], text(48, batch=2)
    inputs = {"attention_mask": torch.ones_like(tokens), "position_ids": places}
    found = whole(patch(with_short_angles(make(row)), kind), tokens, **inputs)
    assert_close(found.double(), whole(reference(row, kind, places, 2), tokens, **inputs))


@pytest.mark.parametrize("row", ["llama", "modernbert"])
@pytest.mark.parametrize("kind", ["alibi", "self_extend", "self_extend_dynamic", "rerope_logn", "window_sinks"])
def test_rows_padded_on_either_side_are_read_as_the_formulae_say(row: str, kind: str) -> None:
    tokens = text(48, batch=2)
    mask = torch.ones_like(tokens)
    mask[0, :13], mask[1, 41:] = 0, 0
    places = positions(mask)
    inputs = {"attention_mask": mask, "position_ids": places}
    found = whole(patch(with_short_angles(make(row)), kind), tokens, **inputs)
    expected = whole(reference(row, kind, places, 2), tokens, **inputs)
    assert_close(found.double()[mask.bool()], expected[mask.bool()])


def test_the_reference_of_every_kind_differs_from_the_others_and_from_none() -> None:
    places, tokens = torch.arange(70)[None], text(70)
    read = [whole(reference("llama", kind, places, 2), tokens) for kind in KINDS]
    read.append(whole(make("llama"), tokens).double())
    apart = [float((one - other)[:, N:].abs().amax(-1).min()) for one, other in itertools.combinations(read, 2)]
    assert min(apart) > 20 * TOLERANCE
