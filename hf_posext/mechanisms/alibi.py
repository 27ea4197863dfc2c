"""Native ALiBi: attention that is handed a bias by distance, computed once for all layers.

Keys carry nothing of it, so that it can be divided anew for each query: what a token reads depends on the divisor of
that token alone, and decoding with a cache is one pass.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posext.contract import DistanceChange, Host, Site
from hf_posext.mechanisms._held import Unheld, hold, holder_of, release
from hf_posext.mechanisms._scope import Scoped

MECHANISM = "alibi"
NAMES = ("alibi", "position_bias")  # parameters by which families hand it on
BUILDERS = ("build_alibi_tensor", "build_mpt_alibi_tensor")  # what computes it, beside the model's class or in it
MASK = "attention_mask"
LENGTHS = "_posext_lengths"


def in_use(owner: PreTrainedModel) -> bool:
    """Whether a model hands its attention a linear bias: it can build one, and its config has no switch that says no.

    Where it does, a rotary module that the model has as well does nothing.
    """
    kind: Any = type(owner)
    return builds(kind) and bool(getattr(owner.config, "alibi", True))


@cache
def builds(model_class: type) -> bool:
    """Whether a class of models, or the module that defines it, has a builder of the bias."""
    homes = [model_class, *(sys.modules.get(kind.__module__) for kind in model_class.__mro__)]
    return any(hasattr(home, name) for home in homes for name in BUILDERS)


def find(scoped: Scoped) -> list[Site]:
    """An attention module that takes the bias, in a model that builds one; not what only hands it on to a part."""
    if not in_use(scoped.owner):
        return []
    name = parameter_of(scoped.module)
    if name is None or any(parameter_of(child) for child in scoped.module.children()):
        return []
    return [Site(MECHANISM, scoped.name, scoped.module, scoped.config, "", name)]


def parameter_of(module: nn.Module) -> str | None:
    """Name of the parameter of its forward that takes a bias."""
    parameters = inspect.signature(module.forward).parameters
    return next((name for name in NAMES if name in parameters), None)


@dataclass
class Growth:
    """A divisor that follows the length of the text: s(i) = min(factor, max(1, l_i / N)).

    Attributes:
        lengths: gives l of each new token of the present forward, [B or 1, L] int64, padding left out.
        trained_length: N in tokens.
        factor: the largest divisor.
    """

    lengths: Callable[[], Tensor]
    trained_length: float
    factor: float

    def divisor(self, bias: Tensor, is_shared: bool) -> Tensor | None:
        """s of each new token, [B or 1, L], of one row where the rows share a bias; None where all are 1.

        Raises:
            ValueError: they share one, and their tokens need other divisors.
        """
        lengths, longest = self.lengths_of(bias)
        if longest <= self.trained_length:
            return None
        scale = (lengths.to(bias.device, exact(bias)) / self.trained_length).clamp(1, self.factor)
        return common(scale, lengths.to(bias.device)) if is_shared and len(scale) > 1 else scale

    def lengths_of(self, bias: Tensor) -> tuple[Tensor, float]:
        """Lengths, and the longest on the host: asked for once for a bias, which all layers are handed, and kept there.

        A layer that gradient checkpointing runs again gets the bias of its own forward, and with it these.
        """
        if torch.compiler.is_compiling():
            return self.lengths(), math.inf
        if not hasattr(bias, LENGTHS):
            lengths = self.lengths()
            setattr(bias, LENGTHS, (lengths, int(lengths.max())))
        return getattr(bias, LENGTHS)


def common(scale: Tensor, lengths: Tensor) -> Tensor:
    """[1, L]: the divisors that rows have in common; both arguments are [B, L].

    Raises:
        ValueError: rows differ in one. Padding, which makes no row longer, may.
    """
    most = scale.amax(0, keepdim=True)
    is_text = lengths.diff(dim=-1, prepend=torch.zeros_like(lengths[:, :1])) > 0
    if bool((is_text & (scale != most)).any()):
        raise ValueError(
            "The rows of this batch have other lengths than each other, beyond the trained length, and this model has "
            "one position bias for all of them. Give rows of one length (or one row at a time, or padding on the "
            "right), or patch with dynamic=False."
        )
    return most


class BiasHolder(Unheld):
    """What an attention module keeps whose bias is divided: by a number, infinite for no bias, or by a `Growth`."""

    def __init__(self, module: nn.Module, field: str, heads: int) -> None:
        self.original_class = type(module)
        self.field = field
        self.heads = heads
        self.names = tuple(inspect.signature(module.forward).parameters)
        self.divisor: float | Growth = 1.0

    @property
    def is_off(self) -> bool:
        """Whether the bias is switched off."""
        return self.divisor == math.inf

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's own forward with a smaller bias."""
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        return forward(module, **{**given, **self.changed(module, given)})

    def changed(self, module: nn.Module, given: dict[str, Any]) -> dict[str, Tensor]:
        """Arguments of the forward that are to be others than those given: the bias, and the mask that contains it."""
        bias: Tensor = given[self.field]
        divisor = self.divisor_of(bias)
        if divisor is None:
            return {}
        if bias.dim() == 4:
            return self.changed_with_mask(module, given, divisor)
        return {self.field: quotient(bias, divisor.repeat_interleave(len(bias) // len(divisor), dim=0)[..., None])}

    def divisor_of(self, bias: Tensor) -> Tensor | None:
        """What the bias is divided by, [B or 1, L or 1]; None for 1 everywhere."""
        if isinstance(self.divisor, Growth):
            return self.divisor.divisor(bias, is_shared=bias.dim() == 3 and len(bias) == self.heads)
        return torch.full((1, 1), self.divisor, dtype=exact(bias), device=bias.device)

    def changed_with_mask(self, module: nn.Module, given: dict[str, Any], divisor: Tensor) -> dict[str, Tensor]:
        """Bias [B, H, 1, S] and a mask [B, H, L, S] that is bias / sqrt(D), which is never negative, where it is open.

        A bias for each query does not fit the first. Where the module would add it as well, the mask gets both.
        """
        bias, mask, divisor = given[self.field], given[MASK], divisor[:, None, :, None]
        if divisor.shape[2] == 1:
            smaller = quotient(bias, divisor)
        else:
            smaller = torch.zeros_like(bias)
            divisor = divisor / 2 if adds_bias(module, given) else divisor
        return {self.field: smaller, MASK: torch.where(mask < 0, mask, quotient(mask, divisor))}


def adds_bias(module: Any, given: dict[str, Any]) -> bool:
    """Whether attention adds the bias to its scores beside the mask that contains it: wherever it computes weights."""
    return module.config._attn_implementation != "sdpa" or bool(given.get("output_attentions"))


def exact(bias: Tensor) -> torch.dtype:
    """What a bias is divided in: float32, float64 where it is that."""
    return torch.promote_types(bias.dtype, torch.float32)


def quotient(values: Tensor, divisor: Tensor) -> Tensor:
    """Values divided by what `exact` has for them, rounded once to their own dtype."""
    return (values / divisor).to(values.dtype)


def read(site: Site, trained_length: int) -> Host:
    """The trained length: the slopes are the model's own business."""
    return Host(trained_length)


def held(site: Site) -> BiasHolder:
    """The holder of a site, which it gets if it has none."""
    if holder_of(site.module) is None:
        hold(site.module, BiasHolder(site.module, site.field, site.config.num_attention_heads))
    return holder_of(site.module)


def write(site: Site, change: DistanceChange) -> None:
    """Divides the bias by one number: float32, rounded once to the dtype that it has.

    Source: Al-Khateeb et al. 2023 (arXiv 2310.13017).
    """
    held(site).divisor = float(change.divisor)


def follow(site: Site, lengths: Callable[[], Tensor], trained_length: float, factor: float) -> None:
    """Divides what each query reads by s(i) = min(factor, max(1, l_i / N)): nothing changes up to N tokens.

    Args:
        site: an attention module.
        lengths: gives, in the present forward, [B or 1, L] int64: tokens of a row up to and with each new one, padding
            left out.
        trained_length: N in tokens.
        factor: the largest s.

    Source: Al-Khateeb et al. 2023 (arXiv 2310.13017), with l of each token in place of that of the text.
    """
    held(site).divisor = Growth(lengths, trained_length, factor)


def silence(site: Site, target_length: int) -> None:
    """Switches the bias off."""
    held(site).divisor = math.inf


def restore(site: Site) -> None:
    """Gives the module back its own bias."""
    if holder_of(site.module) is not None:
        release(site.module)


def reset(model: nn.Module, site: Site) -> None:
    """Nothing: the bias is computed in each forward."""
