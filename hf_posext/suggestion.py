"""suggest: which method, with which arguments and why, by rules from the live model or measured on documents."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import nn

from hf_posext.arguments import check_flag, check_length, check_positive
from hf_posext.errors import PatchError
from hf_posext.evaluation.comparison_report import ComparisonReport
from hf_posext.evaluation.perplexity_table import number
from hf_posext.patching import patch_model
from hf_posext.records import record_of
from hf_posext.reports import Report, plain
from hf_posext.suggesting.facts import Facts, Wanted, read_facts
from hf_posext.suggesting.measuring import Bench, Trial, choose, deep_documents, measure, why_unmeasured
from hf_posext.suggesting.rules import AS_GIVEN, Candidate, candidates
from hf_posext.suggesting.telling import about_choice, about_model, about_numbers, standing, versus_truncate
from hf_posext.suggesting.trying import Tried, arguments_of, attempt

RULES, MEASURED = "rules", "measured"
SUGGESTED, POSSIBLE, IMPOSSIBLE = "suggested", "possible", "not possible"
STYLES = {SUGGESTED: "bold green", IMPOSSIBLE: "dim"}
LENGTHS = ("factor", "target_length", "original_max_position_embeddings")
NOTHING = Tried(
    Candidate(AS_GIVEN, "Nothing that is known helps this model with what is asked for; the table says why.")
)


@dataclass(frozen=True)
class Alternative:
    """One thing that was considered.

    Attributes:
        name: method and options in a few words; `none` is the model as given.
        method: name, None for the model as given.
        arguments: of `patch_model`, empty for the model as given.
        verdict: "suggested", "possible" or "not possible".
        why: what speaks for it, or why the model cannot have it.
        perplexity: at T, None where it was not measured.
        short_cost: in nats per token on text of N tokens, None where it was not measured.
    """

    name: str
    method: str | None
    arguments: dict[str, Any]
    verdict: str
    why: str
    perplexity: float | None = None
    short_cost: float | None = None


@dataclass(frozen=True, repr=False)
class Suggestion(Report):
    """What to use, and why.

    Attributes:
        model: class name.
        trained_length: N in tokens.
        target_length: T in tokens.
        method: name of a method, None where the model is best left as it is.
        arguments: for `patch_model(model, **arguments)`; without a method those of the factor 1, which changes no bit.
        reasons: sentences with numbers of the model and of what was measured.
        alternatives: all that was considered, in the order of the rules.
        notes: what was left out.
        basis: "rules" or "measured".
        versus_truncate: how the method stands at T to the model given the last N tokens: "better", "worse" or "not
            clearly different"; None where that was not measured.
        comparison: the numbers behind it, None where nothing was measured.
    """

    model: str
    trained_length: int
    target_length: int
    method: str | None
    arguments: dict[str, Any]
    reasons: list[str]
    alternatives: list[Alternative]
    notes: list[str] = field(default_factory=list)
    basis: str = RULES
    versus_truncate: str | None = None
    comparison: ComparisonReport | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The arguments beside method and lengths."""
        return {name: value for name, value in self.arguments.items() if name not in ("method", *LENGTHS)}

    @property
    def call(self) -> str:
        """The line of Python to copy; empty where nothing is to be done."""
        words = "".join(f", {name}={value!r}" for name, value in self.arguments.items() if name != "method")
        return "" if self.method is None else f"hf_posext.patch_model(model, {self.method!r}{words})"

    def apply(self, model: nn.Module) -> nn.Module:
        """`patch_model` with these arguments; returns the same model."""
        return patch_model(model, **self.arguments)

    def command(self, model: str = "MODEL", out: str = "OUT") -> str:
        """The command line to copy; empty where nothing is to be done."""
        if self.method is None:
            return ""
        words = [f"--method {self.method}", f"--target-length {self.target_length}"]
        words += ["--dynamic"] if self.options.get("dynamic") else []
        more = {
            name: value for name, value in self.arguments.items() if name not in ("method", "target_length", "dynamic")
        }
        words += [f"--option {name}={plain(value)}" for name, value in more.items()]
        return " ".join(["posext patch", model, f"--out {out}", *words])

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        fields = {name: value for name, value in vars(self).items() if name not in ("comparison", "alternatives")}
        rows = [asdict(each) for each in self.alternatives]
        numbers = None if self.comparison is None else self.comparison.to_dict()
        more = {"options": self.options, "call": self.call, "command": self.command()}
        return plain({**fields, **more, "alternatives": rows, "comparison": numbers})

    def table(self) -> Group:
        """The suggestion and its reasons, then all that was considered."""
        table = Table("considered", "verdict", "why")
        measured = self.comparison is not None
        if measured:
            table.add_column(f"perplexity at {self.target_length}", justify="right")
            table.add_column(f"nats more on {self.trained_length}", justify="right")
        for each in self.alternatives:
            cells = [Text(each.name), Text(each.verdict, STYLES.get(each.verdict, "")), Text(each.why)]
            table.add_row(*cells, *([shown(each.perplexity), signed(each.short_cost)] if measured else []))
        named = next((each.name for each in self.alternatives if each.verdict == SUGGESTED), "none")
        what = "leave the model as it is" if self.method is None else named
        factor = self.target_length / self.trained_length
        head = f"{self.model}, {self.trained_length} -> {self.target_length} (x{factor:.3g}), {self.basis}: {what}"
        lines = [*([self.call] if self.call else []), *(f"- {reason}" for reason in self.reasons)]
        notes = [f"note: {note}" for note in self.notes]
        return Group(Text(head, style="bold"), *map(Text, lines), table, *map(Text, notes))


def shown(perplexity: float | None) -> str:
    """A perplexity for the table."""
    return "" if perplexity is None else number(perplexity)


def signed(nats: float | None) -> str:
    """A difference for the table."""
    return "" if nats is None else f"{nats:+z.3f}"


def suggest(
    model: nn.Module,
    target_length: int,
    documents: Iterable[Any] | None = None,
    *,
    tokenizer: Any = None,
    tuned: bool = False,
    portable: bool = False,
    short_text: bool = True,
    time_budget: float = 300.0,
    original_max_position_embeddings: int | None = None,
    text_column: str = "text",
    progress: bool | None = None,
) -> Suggestion:
    """Which method to use for a longer context, with which arguments, and why.

    Without documents by rules from what the model is now: its mechanism, its frequencies against N, its windows, the
    scaling that it has already. With documents the first choices of the rules are measured on them beside the model
    given the last N tokens, as `compare` does; of those that are not clearly worse than the best one the simplest is
    suggested. What is suggested has been tried on the model, which is afterwards as it was to the last bit.

    Args:
        model: a transformers model without a patch, also inside PEFT or another wrapper.
        target_length: T in tokens; of a model that only sees, pixels per side.
        documents: as for `perplexity`; those of T tokens are used, 32 at most. Causal models only.
        tokenizer: its tokenizer; None where documents are token ids.
        tuned: whether the model will be tuned after the patch.
        portable: whether the saved model has to load in plain transformers, and in what reads its configs.
        short_text: whether text of at most N tokens has to be read as before. By rules what keeps it to the last bit
            comes first, if the model can have it; measured, loss at N counts as much as loss at T.
        time_budget: seconds for measuring; what does not fit is left out, and a note says what.
        original_max_position_embeddings: N in tokens, where the config does not say it or says it wrong.
        text_column: column of a dataset or key of a dict that holds the text.
        progress: a bar on stderr; None shows it in a terminal.

    Raises:
        TypeError, ValueError: a bad argument, a model whose N is not known, documents that are all too short, or text
            without a tokenizer.
        PatchError: the model has a patch already.

    Source: the papers named in each reason; the order is hf_posext's.
    """
    wanted = checked(target_length, tuned, portable, short_text, original_max_position_embeddings)
    deadline = time.monotonic() + check_positive("time_budget", time_budget)
    check_unpatched(model)
    facts = read_facts(model, wanted.given_length)
    tried = [attempt(model, candidate, wanted) for candidate in candidates(facts, wanted)]
    chosen = next((each for each in tried if not each.problem), NOTHING)
    patches = [each for each in tried if each.is_patch]
    if documents is None or not patches:
        notes = [] if documents is None else ["The documents were not used: there is nothing to measure on them."]
        return build(facts, wanted, tried, chosen, Trial(notes=notes))
    unusable = why_unmeasured(model)
    if unusable is not None:
        return build(facts, wanted, tried, chosen, Trial(notes=[unusable]))
    deep = deep_documents(documents, tokenizer, text_column, wanted.target_length)
    trial = measure(Bench(model, tokenizer, deep, facts, wanted, deadline, progress), patches)
    if trial.report is not None:
        able = [each for each in tried if not each.problem]
        best = choose(trial.report, able, wanted)
        if best is None:
            trial = Trial(notes=[*trial.notes, "No method has a finite loss on these documents, so it is by rules."])
        chosen = best or chosen
    return build(facts, wanted, tried, chosen, trial)


def checked(target_length: int, tuned: bool, portable: bool, short_text: bool, given_length: int | None) -> Wanted:
    """What is asked for.

    Raises:
        TypeError, ValueError: a bad value.
    """
    return Wanted(
        target_length=check_length("target_length", target_length),
        tuned=check_flag("tuned", tuned),
        portable=check_flag("portable", portable),
        short_text=check_flag("short_text", short_text),
        given_length=None if given_length is None else check_length("original_max_position_embeddings", given_length),
    )


def check_unpatched(model: nn.Module) -> None:
    """Refuses a model that has a patch.

    Raises:
        PatchError: says which.
    """
    record = record_of(model)
    if record is not None:
        raise PatchError(
            f"The model is already patched: {record.describe()}. Call `unpatch_model` first; `suggest` looks at the "
            "model as it was given."
        )


def build(facts: Facts, wanted: Wanted, tried: list[Tried], chosen: Tried, trial: Trial) -> Suggestion:
    """The suggestion and all that is said about it."""
    report = trial.report
    is_measured = report is not None and chosen.name in report.arms
    told = about_numbers(report, chosen, wanted) if report is not None and is_measured else []
    return Suggestion(
        model=facts.positions.model,
        trained_length=facts.trained_length,
        target_length=wanted.target_length,
        method=chosen.candidate.method,
        arguments=ready(chosen.candidate, facts, wanted),
        reasons=[*told, *about_choice(chosen, facts, wanted), *about_model(facts, wanted)],
        alternatives=[alternative(each, wanted, report, is_chosen=each is chosen) for each in tried],
        notes=[*trial.notes, *facts.positions.notes],
        basis=MEASURED if is_measured else RULES,
        versus_truncate=standing(versus_truncate(report, chosen.name, wanted.target_length))
        if report is not None and is_measured
        else None,
        comparison=report,
    )


def ready(candidate: Candidate, facts: Facts, wanted: Wanted) -> dict[str, Any]:
    """Arguments that `patch_model` takes, whatever was chosen."""
    arguments = arguments_of(candidate, wanted)
    if candidate.method is not AS_GIVEN:
        return arguments
    del arguments["target_length"]
    return {**arguments, "method": "pi" if facts.mechanism == "grid" else "window", "factor": 1.0}


def alternative(tried: Tried, wanted: Wanted, report: ComparisonReport | None, *, is_chosen: bool) -> Alternative:
    """The row of one thing that was tried."""
    candidate, rows, prices = tried.candidate, {}, {}
    if report is not None:
        rows = {row["arm"]: row for row in report.rows if row["context_length"] == wanted.target_length}
        prices = {row["arm"]: row for row in report.short_rows}
    return Alternative(
        name=tried.name,
        method=candidate.method,
        arguments={} if candidate.method is AS_GIVEN else arguments_of(candidate, wanted),
        verdict=IMPOSSIBLE if tried.problem else SUGGESTED if is_chosen else POSSIBLE,
        why=tried.problem or candidate.why,
        perplexity=rows.get(tried.name, {}).get("perplexity"),
        short_cost=prices.get(tried.name, {}).get("difference"),
    )
