"""The sentences of a suggestion, made from the numbers of the model and of what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_posext.evaluation.comparison_report import ComparisonReport
from hf_posext.evaluation.perplexity_table import number
from hf_posext.evaluation.significance import UNCLEAR, WORSE, verdict
from hf_posext.suggesting.facts import PUBLISHED_TURNS, Facts, Wanted
from hf_posext.suggesting.rules import AS_GIVEN
from hf_posext.suggesting.trying import PLAIN, Tried

TABLES = ("learned", "sinusoidal")


def about_model(facts: Facts, wanted: Wanted) -> list[str]:
    """What the model as given says about its positions, where it is to read further than it does."""
    if wanted.target_length <= facts.trained_length:
        return []
    sentences = []
    if facts.scaling or facts.first_length != facts.trained_length:
        kinds = f" by `{'`, `'.join(facts.scaling)}`" if facts.scaling else ""
        total = wanted.target_length / facts.first_length
        sentences.append(
            f"The checkpoint as given is scaled already{kinds}, from {facts.first_length} to {facts.trained_length} "
            f"tokens; the factor counts from there, and is {total:.3g} in all."
        )
    if facts.never_looks_further:
        return sentences
    if facts.turns:
        sentences.append(about_turns(facts))
    if facts.windows:
        sentences.append(
            f"{len(facts.windows)} of {len(facts.rotary)} rotary sites serve layers with a sliding window of "
            f"{max(facts.windows)} tokens and stay as they are."
        )
    return sentences


def about_turns(facts: Facts) -> str:
    """How many channel pairs meet angles beyond N that they never met."""
    share = facts.longest_wavelength / facts.trained_length
    longest = f"the longest wavelength is {facts.longest_wavelength:.4g} tokens, {share:.3g} N"
    if not facts.incomplete:
        return (
            f"Every channel pair turns full circle within {facts.trained_length} tokens ({longest}): beyond N no angle "
            "is new to the model, only distances are."
        )
    return (
        f"{facts.incomplete} of {len(facts.turns)} channel pairs never turn full circle within {facts.trained_length} "
        f"tokens ({longest}): beyond N they meet angles that the model has not seen."
    )


def about_choice(chosen: Tried, facts: Facts, wanted: Wanted) -> list[str]:
    """Why this one, by the rules, and what comes with it."""
    candidate = chosen.candidate
    sentences = [" ".join(part for part in (candidate.why, candidate.evidence) if part)]
    if candidate.method is AS_GIVEN:
        return sentences
    if candidate.options.get("beta_fast") == "auto":
        kept = sum(turn >= PUBLISHED_TURNS for turn in facts.turns)
        sentences.append(
            f"Only {kept} of {len(facts.turns)} pairs make {PUBLISHED_TURNS} turns within N, which is what YaRN keeps: "
            '`beta_fast="auto"` keeps wavelengths up to 32 tokens (hf_posext, N = 256, x4: 1.22 nats instead of 1.39).'
        )
    if facts.scales_logits_itself and candidate.method == "yarn":
        sentences.append(
            "The model scales its logits itself, as only a part of each head rotates: a temperature has to act there "
            '(`temperature="logits"`), or there is none (`attention_factor=1.0`, for configs that cannot say it).'
        )
    if wanted.short_text and not candidate.keeps_short:
        sentences.append(
            f"Text of at most {facts.trained_length} {facts.unit} is not read as before: use `suspended(model)` for it."
        )
    if facts.mechanism in TABLES and not wanted.tuned:
        sentences.append(
            "No longer table that we measured came near cutting the text into pieces of N tokens before it was tuned."
        )
    if chosen.effort == PLAIN and facts.mechanism == "rotary":
        sentences.append("Plain transformers, and what reads its configs, load the saved model.")
    return sentences


def about_numbers(report: ComparisonReport, chosen: Tried, wanted: Wanted) -> list[str]:
    """What was measured of the choice, and whether anything is worth more than the last N tokens."""
    length, trained = wanted.target_length, report.trained_length
    found = {row["arm"]: row for row in report.rows if row["context_length"] == length}
    price = next(row for row in report.short_rows if row["arm"] == chosen.name)
    sentences = ["These are measurements before tuning, which changes the order of methods."] if wanted.tuned else []
    sentences += [
        f"Measured on {found[chosen.name]['documents']} documents: `{chosen.name}` has a perplexity of "
        f"{number(found[chosen.name]['perplexity'])} at {length} tokens, `truncate` (the last {trained} tokens) "
        f"{number(found['truncate']['perplexity'])}: {against(report, chosen.name, length)}.",
        f"On {trained} tokens it costs {price['difference']:+z.3f} nats per token.",
    ]
    methods = [name for name in found if name in report.records and report.records[name] is not None]
    if all(standing(versus_truncate(report, name, length)) == WORSE for name in methods):
        best = min(methods, key=lambda name: found[name]["nll"])
        sentences.insert(
            0,
            f"No untuned method that was measured beats giving the model the last {trained} tokens: `{best}`, the best "
            f"at {length}, is {against(report, best, length)}. Tune the model, or truncate the text.",
        )
    return sentences


def versus_truncate(report: ComparisonReport, arm: str, target_length: int) -> dict[str, Any]:
    """The row of `significance` that compares an arm at T with the bar."""
    wanted = (arm, "truncate", target_length)
    return next(row for row in report.significance if (row["arm"], row["versus"], row["context_length"]) == wanted)


def standing(row: Mapping[str, Any]) -> str:
    """An arm against the bar in a word.

    To be better it needs the p that is corrected for all arms, of which the best was picked; to be worse its own p, as
    "all are worse" is the less likely found by chance the more there are.
    """
    if row["p"] is None:
        return UNCLEAR
    return verdict(row["difference"], row["p_holm"] if row["difference"] < 0 else row["p"])


def against(report: ComparisonReport, arm: str, target_length: int) -> str:
    """How an arm stands to the bar, with the numbers."""
    row = versus_truncate(report, arm, target_length)
    interval = "no interval" if row["low"] is None else f"{row['low']:+z.3f} to {row['high']:+z.3f}"
    return f"{standing(row)} ({row['difference']:+z.3f} nats per token, {interval})"
