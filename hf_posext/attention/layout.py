"""Which channels of a head a model rotates together, found by watching it rotate.

Families keep the two channels of a pair in halves, side by side, behind channels without rotation, or in sections for
several position axes. The layout is not read from a config: the same hidden states are rotated by known angles and by
none, and for each channel the partner and the frequency are those that explain what came out.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

Channels = slice | Tensor
MAX_RELATIVE_ERROR = 0.02  # of a channel's energy: far above bf16 rounding, far below any wrong explanation


class LayoutError(ValueError):
    """What a module does to its keys is not a rotation of channel pairs."""


@dataclass(frozen=True)
class Layout:
    """The channel pairs of one kind of head.

    Attributes:
        name: tells it from the other layouts of a model.
        first: channels that become x cos - y sin.
        second: channels that become y cos + x sin, in the same order.
        frequencies: index into the spectrum for each pair, [P] int64; None for 0, 1, ..., F - 1.
        axes: position axis of each pair, [P] int64; None where there is one axis.
        width: D, channels of a head.
        rotated: channels that rotate, 2 P.
    """

    name: str
    first: Channels
    second: Channels
    frequencies: Tensor | None
    axes: Tensor | None
    width: int
    rotated: int


def usual(name: str, width: int, count: int) -> list[Layout]:
    """The layouts that most families have: pairs in halves, and side by side, in the first channels of a head.

    Args:
        name: of the layout that is chosen.
        width: D, channels of a head.
        count: F, frequencies.
    """
    if 2 * count > width:
        return []
    halves = range(count), range(count, 2 * count)
    neighbours = range(0, 2 * count, 2), range(1, 2 * count, 2)
    return [
        Layout(name, as_slice([*firsts]), as_slice([*seconds]), None, None, width, 2 * count)
        for firsts, seconds in (halves, neighbours)
    ]


def fit(name: str, still: Tensor, turned: Tensor, angles: Tensor) -> Layout | None:
    """The layout that turns one tensor into the other.

    Args:
        name: of the new layout.
        still: [T, D], a head at T tokens without rotation.
        turned: [T, D], the same rotated.
        angles: [A, T, F], angle of frequency f at token t on position axis a.

    Returns:
        The layout, or None where nothing was rotated.

    Raises:
        LayoutError: the channels changed in some other way.
    """
    still, turned, angles = still.double().cpu(), turned.double().cpu(), angles.double()
    moved = ((turned - still).norm(dim=0) > 1e-3 * still.norm(dim=0).clamp(min=1e-12)).nonzero().flatten()
    if not moved.numel():
        return None
    explained = [explain(int(channel), still, turned, angles) for channel in moved]
    pairs = {}
    for channel, (partner, sign, axis, frequency) in zip(moved.tolist(), explained, strict=True):
        if sign < 0:
            pairs[channel] = (partner, frequency, axis)
    firsts = sorted(pairs, key=lambda channel: (pairs[channel][1], channel))
    seconds = [pairs[channel][0] for channel in firsts]
    if sorted([*firsts, *seconds]) != moved.tolist():
        raise LayoutError("its channels do not rotate in pairs")
    frequencies = [pairs[channel][1] for channel in firsts]
    axes = [pairs[channel][2] for channel in firsts]
    in_order = frequencies == list(range(angles.shape[2]))
    return Layout(
        name,
        as_slice(firsts),
        as_slice(seconds),
        None if in_order else torch.tensor(frequencies),
        torch.tensor(axes) if any(axes) else None,
        still.shape[1],
        len(moved),
    )


def explain(channel: int, still: Tensor, turned: Tensor, angles: Tensor) -> tuple[int, float, int, int]:
    """Partner, sign of the sine, axis and frequency of one channel: y_c = x_c cos + sign x_partner sin.

    Raises:
        LayoutError: no channel and angle explain it.
    """
    rest = turned[:, channel, None] - still[:, channel, None] * angles.cos()  # [A, T, F]
    basis = still.T[:, None, :, None] * angles.sin()  # [D, A, T, F]
    overlap = (rest * basis).sum(2)  # [D, A, F]; its sign is that of the sine
    error = rest.square().sum(1) - 2 * overlap.abs() + basis.square().sum(2)
    error[channel] = torch.inf
    best = int(error.argmin())
    partner, place = divmod(best, error[0].numel())
    axis, frequency = divmod(place, error.shape[2])
    energy = turned[:, channel].square().sum() + still[:, partner].square().sum()
    if error.flatten()[best] > MAX_RELATIVE_ERROR**2 * energy:
        raise LayoutError(f"channel {channel} of its heads changes in a way that is not a rotation")
    return partner, float(overlap.flatten()[best].sign()), axis, frequency


def as_slice(channels: list[int]) -> Channels:
    """A regular list of channels as a slice, which gives views; any other as an index."""
    if len(channels) == 1:
        return slice(channels[0], channels[0] + 1)
    step = channels[1] - channels[0]
    regular = step > 0 and all(after - before == step for before, after in pairwise(channels))
    return slice(channels[0], channels[-1] + 1, step) if regular else torch.tensor(channels)
