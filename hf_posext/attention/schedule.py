"""How the frequencies of a rotary site follow the length of the text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hf_posext.contract import Spectrum

STEPS = 32  # scales per doubling of the length
FEWEST, TOKENS = 8, 256  # steps per doubling at least, and tokens of a step where so many steps are left


def steps_for(trained_length: int) -> int:
    """Scales per doubling of the length: 32, or fewer where a step of N tokens and more would have less than 256.

    A block of that many queries keeps a long prompt as cheap as with a fixed factor. Where N is too short for 8 such
    steps, prompts are short as well, and steps are as fine as they can be.
    """
    fitting = trained_length // TOKENS
    return STEPS if fitting < FEWEST else min(STEPS, 1 << (fitting.bit_length() - 1))


def stepped(scale: Tensor, steps: int = STEPS) -> Tensor:
    """Scales >= 1 rounded up to one of some steps per doubling: with 32 of them 1, 33/32, ..., 2, 66/32, 68/32, ...

    Tokens of one step share their keys' rotation.

    Args:
        scale: of any shape, floating.
        steps: a power of two.
    """
    mantissa, exponent = torch.frexp(scale)  # mantissa in [1/2, 1)
    return torch.ldexp((mantissa * 2 * steps).ceil() / (2 * steps), exponent)


@dataclass
class Schedule:
    """The frequencies of some sites at every length.

    Attributes:
        name: tells it from the other schedules of the model.
        base: [F] float64, frequencies of the rotary module: those for short text.
        spectrum: what the method stretches, at scale 1.
        changes: scale s [...] -> inv_freq [..., F] float64, attention scaling and logit scale (numbers or [...]).
        scaling: attention scaling of the rotary module.
        trained_length: N, where the scale starts to grow.
        switch_length: up to which length `base` is in force: N, or less where the checkpoint itself switches before.
        limit: largest scale, infinite for none.
        scales_logits: whether a logit scale other than 1 ever occurs.
        steps: scales per doubling of the length.
        memo: what -> its arguments and value, the last of each kind.
    """

    name: str
    base: Tensor
    spectrum: Spectrum
    changes: Any
    scaling: float
    trained_length: float
    switch_length: int
    limit: float
    scales_logits: bool
    steps: int = STEPS
    memo: dict[str, tuple[Any, Any]] = field(default_factory=dict, repr=False, compare=False)

    def scale(self, lengths: Tensor) -> Tensor:
        """s = max(1, l / N) in steps, at most the limit: float64, of the shape of `lengths`."""
        return stepped((lengths.double() / self.trained_length).clamp(min=1), self.steps).clamp(max=self.limit)

    def level(self, lengths: Tensor) -> Tensor:
        """A number that two lengths share exactly if the same frequencies are in force, 0 for those of short text."""
        return torch.where(lengths > self.switch_length, self.scale(lengths), 0.0)

    def changed(self, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Frequencies in force [..., F], and what cos and sin and all logits are multiplied by: float64.

        At most `switch_length` tokens have the base, 1 and 1 exactly.
        """
        self.follow(lengths.device)
        scale = self.scale(lengths)
        grown = scale > 1
        inv_freq, scaling, logit_scale = self.changes(scale)
        inv_freq = torch.where(grown[..., None], inv_freq, self.spectrum.inv_freq)
        inv_freq = torch.where((lengths > self.switch_length)[..., None], inv_freq, self.base)
        ratio = torch.where(grown, torch.as_tensor(scaling, device=scale.device) / self.scaling, 1.0)
        return inv_freq, ratio, torch.where(grown, torch.as_tensor(logit_scale, device=scale.device), 1.0)

    def differences(self, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What is added to the base [..., F], multiplied to q.k of rotated channels, and to all logits: float32.

        At most `switch_length` tokens have 0, 1 and 1 exactly.
        """
        inv_freq, ratio, logit_scale = self.changed(lengths)
        return (inv_freq - self.base).float(), ratio.square().float(), logit_scale.float()

    def follow(self, device: torch.device) -> None:
        """Moves the constants to where the model is, once."""
        if self.base.device != device:
            self.base = self.base.to(device)
            self.spectrum = replace(self.spectrum, inv_freq=self.spectrum.inv_freq.to(device))
            self.changes.to(device)

    def remembered(self, kind: str, arguments: Any, make: Callable[[], Any]) -> Any:
        """The value that `make` gave for the same arguments the last time, or that it gives now.

        Generation asks for the same many times, since a scale holds for a step of many tokens.
        """
        if kind not in self.memo or self.memo[kind][0] != arguments:
            self.memo[kind] = arguments, make()
        return self.memo[kind][1]
