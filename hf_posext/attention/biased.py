"""Adapters that change what a logit is by the distance alone: a linear bias, or a window."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hf_posext.attention import masks
from hf_posext.attention.bias import causal_linear, distance_bias, masked, symmetric_linear, windowed
from hf_posext.attention.gpu import flash_linear, flex_linear, has_flash
from hf_posext.attention.interface import Attended, Call
from hf_posext.attention.reading import SLOPES, Forward, Reader
from hf_posext.attention.weights import Rows


@dataclass
class ByDistance(ABC):
    """Attention with something added to each logit that depends on its head and distance."""

    reader: Reader
    is_causal: bool

    def attend(self, call: Call) -> Attended:
        """As `Call.run`, with the addition."""
        forward, call = self.reader.of(call)
        call = masks.in_one_dtype(call)
        if self.is_plain(call, forward):
            output = self.plain(call)
            return call.run() if output is None else (output.transpose(1, 2).contiguous(), None)
        if masks.is_special(call):
            return self.dense(call, forward)
        rows = self.rows(call, forward)
        output, weights = masked(
            call.query,
            call.key,
            call.value,
            masks.scale_of(call),
            rows,
            dropout=masks.dropout_of(call),
            weights=masks.is_eager(call),
        )
        return output.transpose(1, 2).contiguous(), weights

    def is_plain(self, call: Call, forward: Forward) -> bool:
        """Whether `plain` may compute a call."""
        return masks.is_plain(call, forward, self.is_causal)

    @abstractmethod
    def plain(self, call: Call) -> Tensor | None:
        """[B, H, L, D of values] where no mask hides anything and positions have no gaps; None: nothing is added."""

    @abstractmethod
    def added(self, module: nn.Module, query_places: Tensor, key_places: Tensor) -> Tensor:
        """What is added to logits, [B or 1, H or 1, l, S] float32, -inf where a key is not seen.

        Args:
            module: the attention module.
            query_places: [B or 1, l] int64.
            key_places: [B or 1, S] int64.
        """

    def rows(self, call: Call, forward: Forward) -> Rows:
        """Addition and mask of some queries: begin, end -> [B or 1, H or 1, end - begin, S] float32."""
        query_places, key_places = masks.places(call, forward)
        mask = masks.additive(call, self.is_causal)
        return lambda begin, end: self.added(call.module, query_places[:, begin:end], key_places) + mask(begin, end)

    def dense(self, call: Call, forward: Forward) -> Attended:
        """By the model's own function, which does more to its logits, with the addition in its mask."""
        mask = self.rows(call, forward)(0, call.query.shape[2])
        lowest = torch.finfo(call.query.dtype).min
        return replace(call, mask=mask.clamp(min=lowest)).run()


def wants_gradient(parameter: Tensor) -> bool:
    """Whether what is computed from a parameter now will be asked for its gradient."""
    return torch.is_grad_enabled() and parameter.requires_grad


@dataclass
class LinearlyBiased(ByDistance):
    """ALiBi: logits minus slope x distance.

    Attributes:
        slopes: of each head for keys before and behind the query, [2, H] float32, which no cast of the model rounds;
            None where they are a parameter of the module.
    """

    slopes: Tensor | None

    def slopes_of(self, module: nn.Module, device: torch.device) -> Tensor:
        """[2, H] float32."""
        if self.slopes is None:
            return getattr(module, SLOPES).float()
        if self.slopes.device != device:
            self.slopes = self.slopes.to(device)  # once, to where the model is
        return self.slopes

    def plain(self, call: Call) -> Tensor:
        """As `ByDistance.plain`."""
        device, scale = call.query.device, masks.scale_of(call)
        before, after = self.slopes_of(call.module, device)
        if device.type == "cuda" and call.query.shape[2] > 1:
            if has_flash(call) and (self.is_causal or torch.equal(before, after)):
                return flash_linear(call, scale, before, self.is_causal)
            return flex_linear(call, scale, before, after, self.is_causal)
        if self.is_causal:
            return causal_linear(call.query, call.key, call.value, before, scale)
        return symmetric_linear(call.query, call.key, call.value, before, after, scale)

    def is_plain(self, call: Call, forward: Forward) -> bool:
        """As `ByDistance.is_plain`; the kernels give slopes no gradient."""
        no_gradient = self.slopes is not None or not wants_gradient(getattr(call.module, SLOPES))
        return no_gradient and super().is_plain(call, forward)

    def added(self, module: nn.Module, query_places: Tensor, key_places: Tensor) -> Tensor:
        """As `ByDistance.added`; a mask that lets a causal model see ahead meets the slopes for keys behind."""
        before, after = self.slopes_of(module, query_places.device)
        return distance_bias(before, after, query_places, key_places)


@dataclass
class Windowed(ByDistance):
    """A sliding window of `width` tokens, and the first `sinks` of a text."""

    width: int
    sinks: int

    def plain(self, call: Call) -> Tensor | None:
        """As `ByDistance.plain`; text within the window is left to the model's own function."""
        if call.key.shape[2] <= self.width:
            return None
        scale = masks.scale_of(call)
        return windowed(call.query, call.key, call.value, self.width, self.sinks, scale, causal=self.is_causal)

    def added(self, module: nn.Module, query_places: Tensor, key_places: Tensor) -> Tensor:
        """As `ByDistance.added`."""
        distance = (query_places[:, :, None] - key_places[:, None, :]).abs()
        return masks.hidden_where((distance >= self.width) & (key_places >= self.sinks)[:, None, :])[:, None]
