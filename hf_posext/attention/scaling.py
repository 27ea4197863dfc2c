"""Dynamic scaling in a model: which lengths are in force, and which caches fit them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_posext.attention.present import Present
from hf_posext.attention.reading import Reader, adapters
from hf_posext.attention.schedule import Schedule
from hf_posext.attention.turns import ScaledForward, Turning

LEVELS = "_posext_levels"


@dataclass
class Dynamics(Reader):
    """The reader of a model with dynamic scaling.

    Attributes:
        schedules: path of each site -> how it follows the length.
        fixed: the lengths, [B] int64, at which the rows of a generation are read until it ends; None for live lengths.
        levels: those of the fixed lengths, which a cache that is filled now belongs to; None for live lengths.
        is_set: whether the rotary modules are set to the one fixed scale, so that nothing is left to turn.
    """

    schedules: dict[str, Schedule] = field(default_factory=dict)
    fixed: Tensor | None = None
    levels: tuple[float, ...] | None = None
    is_set: bool = False

    def levels_of(self, lengths: Tensor) -> tuple[float, ...]:
        """The scale at each of some lengths, [B] int64."""
        schedule = next(iter(self.schedules.values()))
        return tuple(schedule.level(lengths.to(schedule.base.device)).tolist())

    def scale_at(self, length: int) -> float:
        """The scale at which a text of so many tokens is read."""
        schedule = next(iter(self.schedules.values()))
        return float(schedule.scale(torch.tensor(length, device=schedule.base.device)))

    def start(self, now: Present, cache: Any, states: Tensor) -> ScaledForward:
        """As `Reader.start`."""
        check_levels(self, cache)
        if self.fixed is not None:
            rows = states.shape[0] // len(self.fixed)  # beams of one prompt stand side by side
            now = replace(now, fixed=self.fixed.to(states.device).repeat_interleave(rows))
        return ScaledForward(now, cache)

    def finish(self, cache: Any) -> None:
        """Notes in a cache that a forward filled at what scale its keys are."""
        if self.levels is not None:
            cache.__dict__[LEVELS] = self.levels


def check_levels(dynamics: Dynamics, cache: Any) -> None:
    """Refuses a cache that was filled at other scales than it would be read at.

    Raises:
        ValueError: with both.
    """
    if cache is None or torch.compiler.is_compiling():
        return
    there, now = cache.__dict__.get(LEVELS), dynamics.levels
    if there != now and (there is not None or int(cache.get_seq_length()) > 0):
        words = [
            f"scale {', '.join(f'{max(each, 1):g}' for each in way)}" if way else "live scales" for way in (there, now)
        ]
        raise ValueError(
            f"The cache was filled at {words[0]} and would be read at {words[1]}. Start with an empty cache, or patch "
            'with scale="live", where a cache fits every length.'
        )


def turnings(model: nn.Module) -> list[Turning]:
    """The adapters of all attention modules with dynamic scaling."""
    return [each for each in adapters(model) if isinstance(each, Turning)]
