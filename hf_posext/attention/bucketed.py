"""An adapter that adds to each logit what was learned for its head and the bucket of its distance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_posext.attention import cover, masks, toeplitz
from hf_posext.attention.bias import is_fast
from hf_posext.attention.biased import ByDistance, wants_gradient
from hf_posext.attention.interface import Attended, Call
from hf_posext.attention.reading import BIAS, Forward
from hf_posext.attention.toeplitz import Bias


@dataclass
class Bucketed(ByDistance):
    """Logits plus the parameter `posext_bias` of the module, [buckets, H], at the bucket of the distance.

    While it is zero, and no gradient is wanted for it, calls are passed on as they are, so that not a bit changes. A
    compiled graph outlives these zeros, so it always has the addition in it.

    Attributes:
        buckets: of the distances -M, ..., M from query to key, [2M + 1] int64; further ones have those of the ends.
        version: of the parameter when it was last seen not to be zero.
    """

    buckets: Tensor
    version: int | None = None

    def attend(self, call: Call) -> Attended:
        """As `ByDistance.attend`."""
        if self.is_silent(getattr(call.module, BIAS)):
            return self.reader.of(call)[1].run()
        return super().attend(call)

    def is_silent(self, bias: Tensor) -> bool:
        """Whether nothing is added; waits for a device until something is.

        Zeros are looked at each time: fused optimisers, and whoever writes into `.data`, leave the version as it was.
        """
        if torch.compiler.is_compiling() or wants_gradient(bias):
            return False
        if bias._version == self.version:
            return False
        if bool(bias.any()):
            self.version = bias._version
            return False
        return True

    def is_plain(self, call: Call, forward: Forward) -> bool:
        """As `ByDistance.is_plain`; the kernel gives a bias no gradient."""
        no_gradient = not wants_gradient(getattr(call.module, BIAS))
        return no_gradient and is_fast(call.query, call.key, call.value) and super().is_plain(call, forward)

    def plain(self, call: Call) -> Tensor:
        """As `ByDistance.plain`."""
        query, key, value = call.query, call.key, call.value
        (heads, length), (groups, size) = query.shape[1:3], key.shape[1:3]
        ahead = torch.arange(1 - size, length)
        ramp = self.at(call.module, ahead).detach().float()
        if self.is_causal:
            ramp = ramp.masked_fill(ahead > 0, -torch.inf)
        starts, ends = cover.everything(heads, length, size, self.is_causal)
        plan = cover.plan(starts, ends, length, size, groups, self.is_causal, [False] * heads)
        return toeplitz.run(query, key, value, Bias(ramp, size - 1, size - length), plan, masks.scale_of(call))

    def added(self, module: nn.Module, query_places: Tensor, key_places: Tensor) -> Tensor:
        """As `ByDistance.added`, differentiable in the parameter."""
        return self.at(module, key_places[:, None, :] - query_places[:, :, None]).transpose(0, 1)

    def at(self, module: nn.Module, distances: Tensor) -> Tensor:
        """[H, ...] float32 or better: the bias at some distances [...] from query to key."""
        if self.buckets.device != distances.device:
            self.buckets = self.buckets.to(distances.device)  # once, to where the model is
        bias = getattr(module, BIAS)
        by_distance = bias.to(torch.promote_types(bias.dtype, torch.float32)).T.index_select(1, self.buckets)
        reach = len(self.buckets) // 2
        places = distances.clamp(-reach, reach) + reach
        return by_distance.index_select(1, places.flatten()).unflatten(1, places.shape)
