"""The settings of a retrieval probe, validated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real

from hf_posext.arguments import as_float, check_choice, check_length
from hf_posext.errors import unknown
from hf_posext.evaluation.protocols import BARS, check_count
from hf_posext.evaluation.retrieval_sources import WORDINGS

PROBES = ("passkey", "copy", "repeat", "key_value")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
GATE = 0.8  # in-window accuracy below which a probe says nothing of long context


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """Everything that says what is asked and how; checked and completed when it is made.

    Attributes:
        probe: one of `PROBES`.
        context_lengths: tokens of prompt and answer at most, ascending.
        depths: places of the answer in [0, 1], ascending.
        trials: at each depth and length.
        answer_length: digits of a key or value, tokens of a copy.
        wording: of a passkey; None for the other probes.
        bos: `auto`, `none` or `every`.
        bars: names among `BARS`.
        gate: in-window accuracy that is needed, in [0, 1].
        batch_size: prompts per pass.
        seed: of the trials.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a value out of range.
    """

    probe: str
    context_lengths: Sequence[int]
    depths: Sequence[float]
    trials: int
    answer_length: int
    wording: str | None
    bos: str
    bars: Sequence[str]
    gate: float
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        check_choice("probe", self.probe, PROBES)
        check_choice("wording", self.wording, WORDINGS)
        self._set("wording", self.wording if self.probe == "passkey" else None)
        for name in ("trials", "answer_length", "batch_size"):
            self._set(name, check_count(name, getattr(self, name)))
        lengths = _listed("context_lengths", self.context_lengths, "[1024, 4096]")
        self._set("context_lengths", sorted({check_length("context_lengths", length) for length in lengths}))
        depths = _listed("depths", self.depths, "[0, 0.5, 1]")
        self._set("depths", sorted({check_share("depths", depth) for depth in depths}))
        self._set("gate", check_share("gate", self.gate))
        if isinstance(self.bars, str):
            raise TypeError(f"`bars` must be a list of names, got {self.bars!r}. Write bars=[{self.bars!r}].")
        for bar in self.bars:
            if bar not in BARS:
                raise ValueError(unknown("bar", bar, BARS))
        self._set("bars", list(dict.fromkeys(self.bars)))

    @property
    def longest(self) -> int:
        """The longest context length in tokens."""
        return self.context_lengths[-1]

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def check_share(name: str, value: object) -> float:
    """A number from 0 to 1 as float.

    Raises:
        TypeError: not a number (bool included).
        ValueError: outside, or nan.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"`{name}` must be from 0 to 1, got {value!r} of type {type(value).__name__}.")
    if not 0 <= as_float(value) <= 1:
        raise ValueError(f"`{name}` must be from 0 to 1, got {value!r}.")
    return as_float(value)


def _listed(name: str, values: object, example: str) -> list[object]:
    """The values of a list that is not empty.

    Raises:
        TypeError: not a list of numbers.
        ValueError: an empty one.
    """
    if isinstance(values, str | Real) or not isinstance(values, Iterable):
        raise TypeError(f"`{name}` must be a list of numbers such as {example}, got {values!r}.")
    found = [*values]
    if not found:
        raise ValueError(f"`{name}` is empty. Give at least one number, as in {example}.")
    return found
