"""The orders of arms that papers predict, declared before anything is measured, and whether a comparison agrees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_posext import ComparisonReport, PerplexityReport
from hf_posext.evaluation.significance import holm, p_value

SAFE, NO_GAIN, DESCRIPTIVE = "safe", "no gain", "descriptive"
HOLDS, CONTRADICTED, UNCLEAR = "holds", "**contradicted**", "unclear"
LEVEL = 0.05  # of the corrected p, and outside the intervals


@dataclass(frozen=True)
class Claim:
    """An order of two arms.

    Attributes:
        key: number of the ordering.
        better: arm with the lower NLL.
        worse: arm with the higher one.
        times: context lengths in multiples of N; 1 is the price, patched for the longest context and given N tokens.
        source: who says so.
        role: `safe` (one of the tested orders, Holm-corrected together), `no gain` (`worse` is not clearly better,
            which no p can show), or `descriptive` (papers or scales disagree, nothing is claimed).
    """

    key: str
    better: str
    worse: str
    times: tuple[int, ...]
    source: str
    role: str = SAFE


EVERY = "every table: YaRN table 5, DCA table 1, Self-Extend"
GROUPING = "Su (kexue.fm/archives/9708), DCA table 1, Jet-Long"
SHORT = "YaRN table 5: x4 at 2048 PI 7.09, by-parts 4.39, NTK 4.27, YaRN 4.19, unpatched 4.05"
TABLE_5 = "YaRN table 5"
CLAIMS = (
    *(Claim("O1", arm, "none", (2, 4, 8, 16), EVERY) for arm in ("self_extend", "rerope", "yarn")),
    *(Claim("O3", arm, "yarn", (4, 8, 16), GROUPING) for arm in ("self_extend", "rerope")),
    Claim("O3", "yarn", "pi", (4, 8, 16), TABLE_5),
    Claim("O5", "none", "pi", (8,), "Su: 13.5 % against 23.2 % right; YaRN table 5: > 10", role=NO_GAIN),
    *(Claim("O7", "none", arm, (1,), SHORT) for arm in ("pi", "ntk_by_parts", "yarn", "ntk")),
    *(Claim("O7", arm, "pi", (1,), SHORT) for arm in ("ntk_by_parts", "yarn", "ntk")),
    Claim("O8", "yarn", "ntk_by_parts", (4, 8, 16), TABLE_5),
    Claim("O9", "none", "alibi", (1,), "ALiBi, CLEX"),
    Claim("O9", "truncate", "alibi", (4,), "ALiBi, CLEX"),
    Claim("O4", "ntk (once)", "ntk", (4, 8), f"{TABLE_5}: 5.97 at x2, 4.27 at twice the factor", role=DESCRIPTIVE),
    Claim("O6", "pi", "truncate", (2,), f"{TABLE_5}: 4.05 to 3.90", role=DESCRIPTIVE),
    Claim("O13", "self_extend", "dynamic_ntk", (4,), "Jet-Long 77.80 : 77.48; LongEmbed both ways", role=DESCRIPTIVE),
    Claim("O14", "rerope", "truncate", (2, 4, 8, 16), "DCA table 1: 7.87 to 7.64", role=DESCRIPTIVE),
    Claim("6.0", "yarn beta_fast=auto", "yarn", (4, 8, 16), "our default: N / 32 turns", role=DESCRIPTIVE),
)
PAPERS: tuple[tuple[str, ...], ...] = (
    ("self_extend", "rerope"),
    ("yarn",),
    ("ntk_by_parts",),
    ("pi", "ntk", "none"),
)
"""Best first, untuned at four times N and more; equal where papers disagree or all fail. YaRN table 5 at x8: YaRN 3.33,
by-parts 5.79, PI and NTK > 10, unpatched fails; Su, DCA table 1 and Jet-Long put grouping above YaRN."""


def judge(report: ComparisonReport) -> list[dict[str, Any]]:
    """One row per claim and length that was measured: paired difference, interval, p, share of resamples, outcome."""
    rows = [row for claim in CLAIMS for row in _rows(report, claim)]
    tested = [row for row in rows if row["role"] == SAFE]
    for row, p in zip(tested, holm([row["p"] for row in tested]), strict=True):
        row["p_holm"] = p
    return [{**row, "outcome": _outcome(row)} for row in rows]


def exact(report: ComparisonReport) -> dict[str, bool]:
    """O2: arm whose factor follows the length -> whether it has the very sums of the unpatched model at N."""
    known = {one.arm: one for one in report.short}
    follows = [arm for arm, record in report.records.items() if record is not None and record.get("dynamic")]
    return {arm: known[arm].nll == known["none"].nll for arm in follows if arm in known}


def kendall(report: ComparisonReport, times: int) -> dict[str, Any] | None:
    """Kendall's tau of our order of arms at a multiple of N and that of the papers, with its interval over documents.

    Source: Goodman and Kruskal 1954 (J. Am. Stat. Assoc. 49:732): pairs that the papers do not order are left out.
    """
    places = {arm: place for place, arms in enumerate(PAPERS) for arm in arms}
    length = times * (report.trained_length or 0)
    found = {one.arm: one for one in report.measurements if one.context_length == length and one.arm in places}
    if len(found) < len(places):
        return None
    ours = np.stack([_resampled(report, one.nll, one.tokens) for one in found.values()])  # [arms, resamples]
    means = np.array([[sum(one.nll) / sum(one.tokens)] for one in found.values()])
    papers = np.array([places[arm] for arm in found])
    low, high = np.quantile(_tau(ours, papers), [LEVEL / 2, 1 - LEVEL / 2])
    order = sorted(found, key=lambda arm: sum(found[arm].nll) / sum(found[arm].tokens))
    tau = float(_tau(means, papers)[0])
    return {"times": times, "tau": tau, "low": float(low), "high": float(high), "order": order}


def _rows(report: ComparisonReport, claim: Claim) -> Iterator[dict[str, Any]]:
    """The rows of one claim, none where an arm or a length was not measured."""
    trained = report.trained_length or 0
    for times in claim.times:
        of: PerplexityReport = report.price if times == 1 else report
        known = {one.arm: one for one in of.measurements if one.context_length == times * trained}
        if claim.better not in known or claim.worse not in known:
            continue
        one, other = known[claim.better], known[claim.worse]
        shift = _resampled(report, one.nll, one.tokens) - _resampled(report, other.nll, other.tokens)
        yield {
            "claim": claim.key,
            "role": claim.role,
            "source": claim.source,
            "better": claim.better,
            "worse": claim.worse,
            "times": times,
            **of.difference(claim.better, claim.worse, times * trained),
            "p": p_value(one.nll, one.tokens, other.nll, other.tokens),
            "p_holm": None,
            "share": float((shift < 0).mean()),
        }


def _resampled(report: PerplexityReport, nll: Sequence[float], tokens: Sequence[int]) -> NDArray[np.float64]:
    """Mean NLL of an arm over documents drawn with replacement, the same ones for every arm, [resamples]."""
    draw = np.random.default_rng(report.protocol["seed"])
    picks = draw.integers(0, len(nll), size=(report.protocol["resamples"], len(nll)))
    return np.asarray(nll)[picks].sum(-1) / np.asarray(tokens)[picks].sum(-1)


def _tau(ours: NDArray[np.float64], papers: NDArray[np.int64]) -> NDArray[np.float64]:
    """Tau of each column of values, [arms, columns], and one order, [arms], over the pairs that the latter orders."""
    pairs = np.array([*combinations(range(len(papers)), 2)])
    signs = np.sign(ours[pairs[:, 0]] - ours[pairs[:, 1]])  # [pairs, columns]
    expected = np.sign(papers[pairs[:, 0]] - papers[pairs[:, 1]])[:, None]
    return (signs * expected).sum(0) / (expected**2).sum()


def _outcome(row: dict[str, Any]) -> str:
    """What a row says of its claim."""
    is_against, is_for = row["low"] > 0, row["high"] < 0
    if row["role"] == NO_GAIN:
        return CONTRADICTED if is_against else HOLDS
    if is_against:
        return CONTRADICTED
    return HOLDS if is_for and (row["p_holm"] is None or row["p_holm"] < LEVEL) else UNCLEAR
