"""Two invariants of one tiny model: `pi` is a division of positions, and `unpatch_model` gives every bit back."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hf_posext import inspect_model, patch_model, unpatch_model
from hf_posext.lengths import trained_length
from tests import sweep
from tests.architectures import TRAINED_LENGTH
from tests.position_encodings import (
    ALIBI,
    BIASES,
    ROTARY,
    TABLES,
    Encodings,
    biases,
    encodings,
    rotations,
    rows_given,
    with_bias_times,
)
from tests.snapshots import same
from tests.texts import LENGTH, answer, logits, text_inputs

FACTOR = 2
TOLERANCE = 1e-5
Measure = Callable[[Any, int], torch.Tensor]
GIVEN, SPREAD, STEEPER = "logits at given positions", "logits of a spread text", "logits with a steeper bias"
ROWS, GIVEN_BIASES = "rows of a spread text", "biases at given distances"
WAYS: Mapping[str, Measure] = {
    GIVEN: lambda model, step: logits(model, step * torch.arange(LENGTH)),
    SPREAD: lambda model, step: logits(model, spread=step == FACTOR),
}
"""What is compared, with token i at position step * i; the second where a model makes its positions or masks itself."""
ROTATIONS: Mapping[str, Measure] = {
    "cos and sin": lambda model, step: rotations(model, step * torch.arange(LENGTH)),
}
USED_TWICE = {
    "BeamForCausalLM": "the full layers, which do not rotate, scale their queries by position",
    "DeepseekV4ForCausalLM": "positions also choose which tokens are compressed together",
}
"""Model classes whose logits depend on positions by more than rotation, and how; their cos and sin are compared."""
NOT_IN_LOGITS = {
    "LEDForConditionalGeneration": "its windows count masked tokens",
    "PerceiverForMaskedLM": "it answers N times whatever the length of the text",
}
"""Model classes with a table that take no positions and whose logits to a spread text say nothing, and why."""


@dataclass(frozen=True)
class Finding:
    """What the sweep found about one architecture."""

    architecture: str
    """Name in transformers, and which variant."""
    model_class: str
    """The class that was built."""
    mechanisms: tuple[str, ...]
    """What it encodes positions by, of what was examined: rotation, or all others."""
    compared: str
    """In which of the ways `pi` was seen to divide positions; empty where it was not."""
    problems: tuple[str, ...]
    """Why an invariant does not hold; empty where both do."""

    @property
    def holds(self) -> bool:
        """Whether both invariants hold."""
        return not self.problems

    @property
    def is_rotary(self) -> bool:
        """Whether rotation was examined."""
        return self.mechanisms == (ROTARY,)


def examine(architecture: str) -> list[Finding]:
    """Both invariants on a tiny model of one architecture: for rotation, and for all other encodings that it has.

    Raises:
        sweep.CannotBuildError: No tiny model can be made of it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what untouched models warn of is not the subject
        model = sweep.build(architecture)
        seen = encodings(model)
        row = partial(Finding, architecture, type(model).__name__)
        findings = []
        if ROTARY in seen.mechanisms:
            compared, problems = examined(model, rotary_ways(model), patched_rotary)
            findings.append(row((ROTARY,), compared, tuple(problems)))
        others = tuple(sorted(seen.mechanisms - {ROTARY}))
        if others:
            compared, problems = examined(model, other_ways(model, seen), partial(patched_other, seen=seen))
            findings.append(row(others, compared, tuple(problems)))
        return findings


def examined(model: Any, ways: Mapping[str, Measure], patched: Callable[[Any], Iterator[str]]) -> tuple[str, list[str]]:
    """The way in which `pi` was seen to divide positions, and what is wrong.

    Args:
        model: the model.
        ways: what may be compared.
        patched: patches it, and gives whatever it finds wrong.
    """
    before = picture(model)
    expected = {way: measured for way, measure in ways.items() if (measured := attempt(measure, model, 1)) is not None}
    telling = [
        way
        for way in expected
        if (moved := attempt(ways[way], model, FACTOR)) is not None and not close(moved, expected[way])
    ]
    compared, problems = "", []
    try:
        problems += patched(model)
        compared = next((way for way in telling if close(ways[way](model, FACTOR), expected[way])), "")
        if not compared:
            problems.append(f"`pi` is not a division of positions by {FACTOR}")
    except Exception as error:  # any error is a finding
        problems.append(sweep.one_line(error))
    unpatch_model(model)
    after = picture(model)
    changed = [name for name in {**before, **after} if not same(before.get(name), after.get(name))]
    if changed:
        problems.append(f"not restored: {', '.join(changed[:3])}")
    return compared, problems


def attempt(measure: Measure, model: Any, step: int) -> torch.Tensor | None:
    """What a measure gives, None where the model as it is cannot be measured so."""
    try:
        return measure(model, step)
    except Exception:  # positions that it does not take, texts that are too long for it
        return None


def rotary_ways(model: Any) -> Mapping[str, Measure]:
    """What may be compared in a model that rotates."""
    return ROTATIONS if type(model).__name__ in USED_TWICE else WAYS


def other_ways(model: Any, seen: Encodings) -> Mapping[str, Measure]:
    """What may be compared in a model that does not: logits, unless they cannot show it."""
    if type(model).__name__ in NOT_IN_LOGITS:
        return {ROWS: lambda model, step: rows_given(model, sorted(seen.tables), spread=step == FACTOR)}
    if any(type(module).__name__ in BIASES for module in model.modules()):
        return {GIVEN_BIASES: biases}
    first = first_position(model)
    ways = {GIVEN: lambda model, step: logits(model, first + step * torch.arange(LENGTH)), SPREAD: WAYS[SPREAD]}
    return ways | ({STEEPER: with_bias_times} if ALIBI in seen.mechanisms else {})


def first_position(model: Any) -> int:
    """The number by which a model asks for the first token of a text: most count from 0, RoBERTa and its kin do not."""
    own = logits(model)
    for first in range(3):
        given = attempt(lambda model, step: logits(model, step + torch.arange(LENGTH)), model, first)
        if given is not None and close(given, own):
            return first
    return 0


def patched_rotary(model: Any) -> Iterator[str]:
    """Patches a model that rotates."""
    patch_model(model, "pi", factor=FACTOR, layers="all", **length_for(trained_length(model.config)))
    yield from ()


def patched_other(model: Any, seen: Encodings) -> Iterator[str]:
    """Patches a model that is told positions in other ways; gives what is wrong with how far it reads then."""
    report, before = inspect_model(model), logits(model)
    length = FACTOR * expected_length(model.config, seen)
    yield from unlike(seen, report.sites)
    patch_model(model, "pi", factor=FACTOR, layers="all", **length_for(report.trained_length))
    usable = inspect_model(model).usable_length
    if usable != length:
        yield f"`inspect_model` says {usable} tokens for {length}"
    if close(logits(model), before):
        yield "nothing changed"
    read(model, length)
    if seen.tables:
        yield from beyond(model, length + 1)


def expected_length(config: Any, seen: Encodings) -> int:
    """N: what the configuration says, which here is 32 where it says nothing, or less where a table has fewer rows."""
    stated = getattr(config.get_text_config(decoder=True), "max_position_embeddings", -1)
    stated = stated if stated > 0 else TRAINED_LENGTH  # XLNet says -1
    return min(seen.length or stated, stated)


def unlike(seen: Encodings, sites: Any) -> Iterator[str]:
    """How what was found in a model differs from what was seen in its forward."""
    paths = {site.site for site in sites if site.mechanism in TABLES}
    missing = seen.mechanisms - {site.mechanism for site in sites}
    if missing:
        yield f"not found: {', '.join(sorted(missing))}"
    yield from (f"not found: {path}" for path, kind in seen.tables.items() if path not in paths and kind not in missing)
    yield from (f"taken for a table of positions: {path}" for path in sorted(paths & seen.others))


def read(model: Any, length: int) -> None:
    """Has a model read a text without padding."""
    answer(model, text_inputs(model, length, padding=0))


def beyond(model: Any, length: int) -> Iterator[str]:
    """What is wrong with how a model takes a text that is too long for its tables."""
    try:
        read(model, length)
    except ValueError as error:
        if str(length - 1) not in str(error):
            yield f"{length} tokens: the error does not say {length - 1}"
    except Exception as error:
        yield f"{length} tokens: {sweep.one_line(error)}"
    else:
        yield f"{length} tokens: no error"


def length_for(stated: int | None) -> dict[str, Any]:
    """The argument that says N where the config does not."""
    return {} if stated else {"original_max_position_embeddings": TRAINED_LENGTH}


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal up to a fraction of the largest value."""
    return one.shape == other.shape and bool((one - other).abs().max() <= TOLERANCE * other.abs().max())


def picture(model: Any) -> dict[str, Any]:
    """Everything that must come back bit for bit."""
    return {
        "logits": logits(model),
        "config": model.config.to_json_string(use_diff=False),
        "state-dict keys": list(model.state_dict()),
        **{f"class of {name}": type(module) for name, module in model.named_modules()},
        **{f"parameter {name}": value.detach().clone() for name, value in model.named_parameters()},
        **{f"buffer {name}": value.detach().clone() for name, value in model.named_buffers()},
    }
