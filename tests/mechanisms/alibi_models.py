"""Tiny models with native ALiBi, ways to patch them, and what reaches their attention."""

import functools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_posext
from hf_posext.contract import DistanceChange, Site
from hf_posext.mechanisms import alibi
from hf_posext.mechanisms._held import original_class
from hf_posext.mechanisms._scope import scoped_modules
from tests.architectures import VOCABULARY
from tests.dynamic import cache_name, whole
from tests.special_models import build

N, FACTOR, LENGTH = 16, 3.0, 40
"""Trained length and tokens of a long text: its last ones are at LENGTH / N < FACTOR."""
HEADS = 6
SLOPES = torch.tensor([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3], dtype=torch.float64)
"""Of six heads: those of four, and every other one of eight."""
COMMON = {"vocab_size": VOCABULARY, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
FALCON = {"hidden_size": 96, "num_attention_heads": HEADS, "max_position_embeddings": N, "alibi": True}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", {"hidden_size": 96, "n_head": HEADS, "seq_length": N}),
    "mpt": ("mpt", {"d_model": 96, "n_heads": HEADS, "max_seq_len": N}),
    "falcon": ("falcon", FALCON),
    "falcon_eager": ("falcon", {**FALCON, "attn_implementation": "eager"}),
    "falcon_grouped": ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
}
LAYERS = {"bloom": "n_layer", "mpt": "n_layers", "falcon": "num_hidden_layers"}
FAMILIES = ["bloom", "mpt", "falcon", "falcon_eager"]
BY_MASK = [family for family in FAMILIES if family != "mpt"]
"""Families whose bias counts unmasked tokens; MPT counts slots."""


def tiny(family: str, layers: int = 2, **settings: Any) -> Any:
    """A random model in evaluation mode, the same each time."""
    kind, own = SETTINGS[family]
    return build("AutoModelForCausalLM", kind, {**COMMON, **own, LAYERS[kind]: layers, **settings})


def raised(model: Any, factor: float = FACTOR) -> Any:
    """The model with a config that allows factor times N tokens, as a patch sets it: MPT builds that many biases."""
    if hasattr(model.config, "max_seq_len"):
        model.config.max_seq_len = math.ceil(factor * N)
    return model


def sites(model: Any) -> list[Site]:
    """Its attention modules that are handed a bias."""
    return [site for scoped in scoped_modules(model) for site in alibi.find(scoped)]


def divided(model: Any, factor: float) -> Any:
    """The model with distances divided by one number."""
    for site in sites(model):
        alibi.write(site, DistanceChange(factor))
    return model


def written(model: Any, factor: float = FACTOR) -> Any:
    """The same with a config that allows as much text."""
    return divided(raised(model, factor), factor)


class Lengths:
    """Tokens of each row up to and with each new one, of the forward that runs, from its mask or its cache."""

    def __init__(self, model: Any) -> None:
        self.now: Tensor | None = None
        self.cache = cache_name(model)
        model.register_forward_pre_hook(self.note, with_kwargs=True)
        model.register_forward_hook(self.forget, always_call=True)

    def note(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        count, mask, cache = kwargs["input_ids"].shape[1], kwargs.get("attention_mask"), kwargs.get(self.cache)
        past = 0 if cache is None else cache.get_seq_length()
        self.now = torch.arange(past + 1, past + count + 1)[None] if mask is None else mask.cumsum(-1)[:, -count:]

    def forget(self, *_: Any) -> None:
        self.now = None

    def __call__(self) -> Tensor:
        assert self.now is not None, "asked outside of a forward"
        return self.now


def following(model: Any, factor: float = FACTOR) -> Any:
    """The model with a divisor that follows the length, N being its trained length."""
    lengths = Lengths(raised(model, factor))
    for site in sites(model):
        alibi.follow(site, lengths, N, factor)
    return model


def by_patch(model: Any, factor: float = FACTOR, **options: Any) -> Any:
    """The same through the public function."""
    return hf_posext.patch_model(model, "pi", factor, **options)


STATIC: list[Any] = [pytest.param(written, id="written"), pytest.param(by_patch, id="patched")]
DYNAMIC: list[Any] = [
    pytest.param(following, id="written"),
    pytest.param(functools.partial(by_patch, dynamic=True), id="patched"),
]
Patch = Callable[[Any, float], Any]


def text(length: int = LENGTH, batch: int = 1, seed: int = 3) -> Tensor:
    """Random token ids, [B, L]."""
    return torch.randint(5, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


@contextmanager
def slopes_divided(model: Any, factor: float) -> Iterator[None]:
    """transformers' own functions with slopes divided by the factor, for the length of a block."""
    module = sys.modules[type(model).__module__]
    name = next(name for name in ("_get_alibi_slopes", *alibi.BUILDERS) if hasattr(module, name))
    own = getattr(module, name)
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(module, name, lambda *args, **kwargs: own(*args, **kwargs) / factor)
        yield


@contextmanager
def biases(model: Any) -> Iterator[list[tuple[Tensor, Tensor | None]]]:
    """What reaches the attention module's own forward: the bias, and the mask where that contains it, in order."""
    found: list[tuple[Tensor, Tensor | None]] = []
    site = sites(model)[0]
    kind = original_class(site.module)
    own = kind.forward

    @functools.wraps(own)
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        bias = kwargs[site.field]
        found.append((bias, kwargs["attention_mask"] if bias.dim() == 4 else None))
        return own(module, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(kind, "forward", forward)
        yield found


def first_bias(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
    """Those of the first layer."""
    with biases(model) as found:
        whole(model, tokens)
    return found[0]


def renamed(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch as the arguments of `whole`."""
    return {"tokens": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def spread_out(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """A text with a masked token behind each token, and its mask."""
    mask = torch.stack([torch.ones_like(tokens), torch.zeros_like(tokens)], dim=2).flatten(1)
    return tokens.repeat_interleave(2, dim=1), mask


def switched_off(model: Any) -> Any:
    """The model without its bias."""
    for site in sites(model):
        alibi.silence(site, N)
    return model


ALL: dict[str, Callable[[Any], Any]] = {"pi": written, "dynamic": following, "off": switched_off}
"""What can be done to a model, by name."""
