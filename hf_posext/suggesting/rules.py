"""The rules: what can be done to a model, the best first, decided by mechanism, live numbers and what is wanted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hf_posext.suggesting.facts import Facts, Wanted

GROUPING_FROM = 4.0  # factor from which grouped distances are ahead in every comparison of untuned models that we know
HEADROOM = 4 / 3  # a base made for s N is read well up to about 3/4 of it
AS_GIVEN = None  # the method of leaving a model as it is
ALIBI_TABLE = "WikiText-103, arXiv 2108.12409, table 2"
YARN_TABLE = "Proof-pile, arXiv 2309.00071, table 5"


@dataclass(frozen=True)
class Candidate:
    """One thing that can be done.

    Attributes:
        method: name of a method, or None for leaving the model as it is.
        why: what speaks for it and against it, in a sentence.
        evidence: published numbers, with their source.
        options: arguments of `patch_model` beside method and lengths.
        keeps_short: whether text of at most N tokens is read as before, to the last bit.
    """

    method: str | None
    why: str
    evidence: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    keeps_short: bool = False


def candidates(facts: Facts, wanted: Wanted) -> list[Candidate]:
    """What can be done, the best first; whether the model can have it is another question."""
    nothing = leave_it(facts, wanted)
    first = [] if nothing is None else [nothing]
    if facts.mechanism is None or wanted.target_length <= facts.trained_length:
        return first
    return [*first, *RULES[facts.mechanism](facts, wanted)]


def leave_it(facts: Facts, wanted: Wanted) -> Candidate | None:
    """The model as it is, where that will do; None where it will not."""
    trained, target = facts.trained_length, wanted.target_length
    evidence = ""
    if target <= trained:
        why = f"The model as given reads {trained} {facts.unit}, which covers {target}."
    elif facts.mechanism is None:
        why = "No position encoding that is known was found, so nothing ends or turns further beyond N."
    elif facts.mechanism == "rotary" and facts.never_looks_further:
        why = f"Every layer that rotates sees a window of at most {max(facts.windows)} tokens: no new distance occurs."
    elif facts.mechanism == "relative_bias":
        why = "Distances beyond the last bucket share its bias, so that no length is out of range."
        evidence = f"T5 biases trained at 512 tokens: perplexity 19.1 at 712, 20.4 at 2512 ({ALIBI_TABLE})."
    elif facts.mechanism == "alibi" and wanted.portable:
        why = "A linear bias reads further as it is, and no config of plain transformers can say other slopes."
        evidence = f"Trained at 512 tokens: perplexity 19.1 at 712, 18.3 at 15512 ({ALIBI_TABLE})."
    else:
        return None
    return Candidate(AS_GIVEN, why, evidence, keeps_short=True)


def for_rotation(facts: Facts, wanted: Wanted) -> list[Candidate]:
    """Frequencies, or the distances that they meet."""
    fixed, base, divided = fixed_ramp(facts, wanted), larger_base(facts, wanted), positions_divided(wanted)
    if wanted.portable:
        return [fixed, *base, *divided]
    ramps = [following_ramp(facts, wanted), fixed] if wanted.short_text else [fixed, following_ramp(facts, wanted)]
    grouped, clipped = groupings(wanted)
    is_far = wanted.target_length / facts.trained_length >= GROUPING_FROM
    first = [grouped, *ramps] if is_far and not wanted.tuned else [*ramps, grouped]
    return [*first, clipped, *base, *divided]


def groupings(wanted: Wanted) -> tuple[Candidate, Candidate]:
    """Distances beyond a window are read as trained ones: in groups, or clipped."""
    why = (
        "Untuned ahead of YaRN and PI from 4 N on; acts in attention, which costs time, and only this package loads it."
    )
    evidence = (
        "Qwen3 at 4 N, RULER: SelfExtend 77.8, YaRN 67.2 (arXiv 2607.07740). At 8 N, accuracy: ReRoPE 48.5 %, "
        "NTK 39.3 %, PI 13.5 % (kexue.fm/archives/9708). E5-Mistral, LongEmbed: NTK 75.3, SelfExtend 72.4, PI 59.4 "
        "(arXiv 2404.12096)."
    )
    extend = {"group_size": "dynamic"} if wanted.short_text else {}
    return (
        Candidate("self_extend", why, evidence, extend, keeps_short=wanted.short_text),
        Candidate("rerope", f"{why} Short text is read a little differently.", evidence),
    )


def following_ramp(facts: Facts, wanted: Wanted) -> Candidate:
    """YaRN with a factor that follows the length."""
    why = (
        "Untuned mostly the best change of frequencies, and text up to N is read as before; only this package loads it."
    )
    if wanted.tuned:
        why += " The adapter is off for text up to N as well (`only_beyond_trained_length`)."
    evidence = (
        "LLaMA-7B, perplexity at 2048 (N) to 32768 tokens: 4.05, 3.67, 3.65, 3.33, 3.45, where a fixed x16 has 4.61 at "
        f"2048 ({YARN_TABLE})."
    )
    options = {"temperature": "logits"} if facts.scales_logits_itself else {}
    return Candidate("yarn", why, evidence, {"dynamic": True, **options}, keeps_short=True)


def fixed_ramp(facts: Facts, wanted: Wanted) -> Candidate:
    """YaRN with one factor for all text."""
    if wanted.tuned:
        why = "Needs few steps of tuning; one factor for all lengths costs short text."
        evidence = (
            "LLaMA-7B tuned 400 steps at x16, perplexity at 32768 tokens: YaRN 2.77, PI 3.57, NTK 8.49 "
            f"({YARN_TABLE}). On tasks others find NTK ahead: RULER at 32k 59.4 to 37.0 (arXiv 2409.12181)."
        )
    else:
        why = "Untuned mostly the best change of frequencies; one factor for all lengths costs short text."
        evidence = (
            "LLaMA-7B at the target of x2, x4, x8: YaRN 3.67, 3.65, 3.33, PI 3.90, 6.18, above 10; at 2048 tokens "
            f"4.07, 4.19, 4.37 instead of 4.05 ({YARN_TABLE}). On other text PI is ahead: PG-19 at x2 10.7 to 32.6 "
            "(arXiv 2402.13753)."
        )
    options: dict[str, Any] = {}
    if facts.scales_logits_itself:
        options = {"attention_factor": 1.0} if wanted.portable else {"temperature": "logits"}
    if facts.is_ramp_too_fast:
        options["beta_fast"] = "auto"
    return Candidate("yarn", why, evidence, options)


def larger_base(facts: Facts, wanted: Wanted) -> list[Candidate]:
    """A new `rope_theta` with headroom; none where fewer than two pairs turn, as it needs an exponent.

    Source: YaRN (arXiv 2309.00071), eq. 16, b' = b s^(d/(d-2)).
    """
    turning = sum(turn > 0 for turn in facts.turns)
    if facts.spectrum is None or turning < 2:
        return []
    stretch = HEADROOM * wanted.target_length / facts.trained_length
    theta = round(facts.spectrum.base * stretch ** (turning / (turning - 1)))
    why = f"A base for {HEADROOM:.3g} T (NTK): kind to short text, and what every reader of `rope_theta` can load."
    evidence = f"Made for exactly T it fails at T: LLaMA-7B x4 at 8192 tokens above 10, YaRN 3.65 ({YARN_TABLE})."
    return [Candidate("abf", why, evidence, {"rope_theta": theta})]


def positions_divided(wanted: Wanted) -> list[Candidate]:
    """Position interpolation, with a factor that follows the length where short text counts."""
    why = "Needs tuning, and costs short text most."
    evidence = "LLaMA-7B x4, perplexity at 8192 tokens: 16.1 untuned, 7.1 after 200 steps (arXiv 2306.15595)."
    follows = Candidate("pi", "Needs tuning; text up to N is read as before.", evidence, {"dynamic": True}, True)
    return [*([follows] if wanted.short_text and not wanted.portable else []), Candidate("pi", why, evidence)]


def for_rows(facts: Facts, wanted: Wanted) -> list[Candidate]:
    """A longer table of learned rows."""
    freeze = {"frozen_rows": True} if wanted.tuned and wanted.short_text else {}
    copied = Candidate(
        "tile",
        "Copied rows leave text up to N as it was; they need tuning.",
        "RoBERTa, bits per character: 1.85 at 512 tokens, at 4096 with random rows 10.3, with copies 1.96, tuned 1.71 "
        "(Longformer, arXiv 2004.05150).",
        freeze,
        keeps_short=True,
    )
    composed = Candidate(
        "hierarchical",
        "Rows composed of pairs of old ones leave text up to N as it was and reach N^2 tokens; they need tuning.",
        "kexue.fm/archives/7947.",
        freeze,
        keeps_short=True,
    )
    evidence = "Tuning new rows alone, E5 on LongEmbed: 41.0 with 512 tokens, 56.6 with 4k (arXiv 2404.12096)."
    follows = Candidate("pi", "Interpolated rows, for long text only.", evidence, {"dynamic": True}, keeps_short=True)
    spread = Candidate(
        "pi",
        "Interpolated rows tune better than copied ones, and move the positions of short text.",
        evidence,
        {"frozen_rows": True} if wanted.tuned else {"mode": "cubic"},
    )
    if wanted.tuned and not wanted.short_text:
        return [spread, copied, composed]
    return [copied, composed, follows, spread]


def for_sinusoids(facts: Facts, wanted: Wanted) -> list[Candidate]:
    """A fixed table, of which more rows can be computed."""
    why = "Positions / s, exact between rows as well."
    evidence = f"Sinusoids beyond N are new: trained at 512 tokens, perplexity 24.9 at 712, 76 at 1512 ({ALIBI_TABLE})."
    further = Candidate("sinusoidal", "Further rows by the same formula; they need tuning.", evidence, keeps_short=True)
    return [*by_length(why, evidence, wanted), further]


def for_distances(facts: Facts, wanted: Wanted) -> list[Candidate]:
    """A bias made of distances: they can be divided."""
    if facts.mechanism == "alibi":
        why = "Slopes / s keep the penalty of the furthest token within what the model has seen."
        return by_length(why, "arXiv 2310.13017, in which the factor follows the length.", wanted)
    return by_length("Distances / s before bucketing, of which no result is published.", "", wanted)


def by_length(why: str, evidence: str, wanted: Wanted) -> list[Candidate]:
    """`pi` with a factor that follows the length, and with one for all text."""
    follows, fixed = Candidate("pi", why, evidence, {"dynamic": True}, True), Candidate("pi", why, evidence)
    return [follows, fixed] if wanted.short_text else [fixed, follows]


def for_patches(facts: Facts, wanted: Wanted) -> list[Candidate]:
    """The grid of a vision model."""
    return [Candidate("pi", "The model's own code interpolates its table for larger images.", "arXiv 2010.11929.")]


RULES: dict[str, Callable[[Facts, Wanted], list[Candidate]]] = {
    "rotary": for_rotation,
    "learned": for_rows,
    "sinusoidal": for_sinusoids,
    "alibi": for_distances,
    "relative_bias": for_distances,
    "grid": for_patches,
}
