"""Scores the windows of a plan with a model, and sums what was scored: per document, and by position."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from hf_posext.evaluation.perplexity_report import ALL, Measurement
from hf_posext.evaluation.protocols import Common, Plan, Settings
from hf_posext.evaluation.pseudo_report import names_of_positions
from hf_posext.evaluation.scoring import score
from hf_posext.evaluation.windows import Pass, Window

BUCKETS_PER_OCTAVE = 2

Scores = dict[int, list[Tensor]]  # context length -> NLL per window, fp32 [targets]


def score_plan(
    model: nn.Module, plan: Mapping[int, Sequence[Pass]], settings: Common, arm: str, progress: bool | None
) -> Scores:
    """NLL of every window of a plan, what is longest first; `arm` is what the progress bar calls the model.

    Raises:
        LengthError: a length that the model cannot read.
    """
    scores = score(
        model,
        [window for windows in plan.values() for window in windows],
        batch_size=settings.batch_size,
        chunk=settings.chunk,
        prefill_chunk_size=settings.prefill_chunk_size,
        progress=progress,
        description=f"{arm}, up to {max(plan, default=0)} tokens",
    )
    remaining = iter(scores)
    return {length: list(islice(remaining, len(windows))) for length, windows in plan.items()}


def measurements(settings: Settings, arm: str, plan: Plan, scores: Scores) -> list[Measurement]:
    """One measurement per context length; for `full` all of them from the one pass."""
    if settings.protocol != "full":
        return [measurement(arm, length, plan[length], scores[length]) for length in settings.context_lengths]
    windows = plan[settings.longest]
    found = []
    for length in settings.context_lengths:
        pairs = zip(windows, scores[settings.longest], strict=True)
        found.append(measurement(arm, length, windows, [row[: length + 1 - window.first] for window, row in pairs]))
    return found


def measurement(arm: str, length: int, windows: list[Window], nll: list[Tensor]) -> Measurement:
    """Sums per document, in float64."""
    sums: dict[int, float] = defaultdict(float)
    tokens: dict[int, int] = defaultdict(int)
    for window, row in zip(windows, nll, strict=True):
        sums[window.document] += float(row.double().sum())
        tokens[window.document] += len(row)
    return Measurement(arm, length, tuple(sums), tuple(sums.values()), tuple(tokens.values()))


def placed_measurements(
    arm: str, length: int, windows: Sequence[Pass], nll: Sequence[Tensor], trained: int | None
) -> Iterator[Measurement]:
    """Sums per document in float64: of all targets, of those at positions up to N, and of those beyond it.

    Args:
        arm: name of the arm.
        length: context length in tokens.
        windows: those of this length; they say at which position each target stands, the first token being at 1.
        nll: of the same targets in the same order, also where they were read in other windows.
        trained: N in tokens; None tells no positions apart.
    """
    values = torch.cat([*nll]).double()
    documents = torch.cat([torch.full_like(window.rows, window.document) for window in windows])
    is_within = torch.cat([window.rows for window in windows]) < (trained or length)
    chosen = {ALL: torch.ones_like(is_within)}
    if trained is not None:
        chosen |= dict(zip(names_of_positions(trained), (is_within, ~is_within), strict=True))
    for positions, here in chosen.items():
        tokens = torch.bincount(documents[here])
        sums = torch.bincount(documents[here], weights=values[here])
        found = torch.nonzero(tokens).flatten()
        if len(found):
            scored, summed, counted = (tuple(column.tolist()) for column in (found, sums[found], tokens[found]))
            yield Measurement(arm, length, scored, summed, counted, positions)


def curve(arm: str, plan: Plan, scores: Scores) -> list[dict[str, Any]]:
    """Mean NLL in log-spaced buckets of the number of tokens read before the target."""
    ((longest, windows),) = plan.items()
    edges = bucket_edges(longest)
    sums, tokens = [0.0] * len(edges), [0] * len(edges)
    for window, row in zip(windows, scores[longest], strict=True):
        for bucket, (first, last) in enumerate(edges):
            part = row[max(0, first - window.first) : last + 1 - window.first]
            sums[bucket] += float(part.double().sum())
            tokens[bucket] += len(part)
    return [
        {"arm": arm, "first": first, "last": last, "nll": total / count, "tokens": count}
        for (first, last), total, count in zip(edges, sums, tokens, strict=True)
        if count
    ]


def bucket_edges(longest: int) -> list[tuple[int, int]]:
    """First and last position, inclusive, of buckets that together cover 1 to `longest`, each once."""
    steps = range(BUCKETS_PER_OCTAVE * longest.bit_length())
    starts = sorted({start for step in steps if (start := round(2 ** (step / BUCKETS_PER_OCTAVE))) <= longest})
    return [(first, after - 1) for first, after in zip(starts, [*starts[1:], longest + 1], strict=True)]
