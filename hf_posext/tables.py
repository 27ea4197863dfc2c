"""Tables of positions in a model: written, told how long each text is, proved, and found again in a checkpoint."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posext import mechanisms, probe
from hf_posext.attention.present import Present
from hf_posext.attention.reading import Reader, attach
from hf_posext.attention.scaling import Dynamics
from hf_posext.contract import PositionTable, Site, TableChange
from hf_posext.errors import PatchError
from hf_posext.mechanisms._scope import scoped_modules
from hf_posext.planning import Plan
from hf_posext.spans import is_whole

LONG = "_posext_long"
CROSSES = (
    "The tokens in the cache were read with the table {was}, and a text of {length} tokens is read with the one {now}. "
    'Say beforehand how long the text will become: `patch_model(..., scale="frozen")` for `generate`, or '
    "`hf_posext.fixed_length(model, length)`; or start with an empty cache."
)


@dataclass
class RowChoice(Dynamics):
    """The reader of a model whose texts are read with the old table up to N tokens, and with the new one beyond.

    Attributes:
        trained_length: N of the table.
        factor: s.
        is_long: [B or 1] bool, what the present forward has chosen.
    """

    trained_length: int = 0
    factor: float = 1.0
    is_long: Tensor | None = None

    def levels_of(self, lengths: Tensor) -> tuple[float, ...]:
        """s for texts beyond N, 1 for others."""
        return tuple(torch.where(lengths > self.trained_length, self.factor, 1.0).tolist())

    def scale_at(self, length: int) -> float:
        """As `Dynamics.scale_at`."""
        return self.factor if length > self.trained_length else 1.0

    def chooses(self, positions: Tensor) -> Tensor:
        """[B or 1] bool: rows of a batch that are read with the new table.

        Args:
            positions: [B or 1, L] int64, where the tokens of this forward stand, those of padding anywhere.

        Raises:
            ValueError: a text whose tokens in the cache were read with the other table, or that is longer than the
                length that was fixed and N.
        """
        now = None if self.forward is None else self.forward.now
        counted = None if now is None else new_ones(now)
        reach = (positions if counted is None else torch.where(counted, positions, -1)).amax(-1)
        fixed = None if now is None else now.fixed
        is_long = (reach if fixed is None else fixed.to(reach.device) - 1) >= self.trained_length
        if now is None or torch.compiler.is_compiling():
            return is_long
        if fixed is not None:
            self.check_reach(is_long, reach)
        elif int(now.past) > 0:
            self.check_cache(
                is_long, reach, positions if counted is None else torch.where(counted, positions, reach[:, None])
            )
        self.is_long = is_long
        return is_long

    def check_reach(self, is_long: Tensor, reach: Tensor) -> None:
        """Refuses a text that is longer than the old table, with which it is to be read.

        Raises:
            ValueError: with both lengths.
        """
        beyond = ~is_long & (reach >= self.trained_length)
        if beyond.any():
            raise ValueError(
                f"A text of {int(reach[beyond].max()) + 1} tokens is longer than the length that was fixed for it, and "
                f"than the {self.trained_length} tokens up to which that reads. Fix the length that it will have."
            )

    def check_cache(self, is_long: Tensor, reach: Tensor, positions: Tensor) -> None:
        """Refuses a text whose tokens in the cache were read with the other table.

        Where nothing was noted in the cache they were read with the old one if there are at most N.

        Raises:
            ValueError: with both.
        """
        noted = None if self.forward is None else vars(self.forward.cache).get(LONG)
        if noted is None or len(noted) not in (1, len(is_long)):
            noted = positions.amin(-1) > self.trained_length
        crosses = is_long != noted.to(is_long.device)
        if crosses.any():
            words = f"for up to {self.trained_length} tokens", "for longer texts"
            row = int(crosses.int().argmax())
            was, now = words if bool(is_long.expand(len(crosses))[row]) else reversed(words)
            raise ValueError(CROSSES.format(was=was, length=int(reach.expand(len(crosses))[row]) + 1, now=now))

    def finish(self, cache: Any) -> None:
        """Notes in a cache also which table its tokens were read with."""
        super().finish(cache)
        vars(cache)[LONG] = self.is_long


def new_ones(now: Present) -> Tensor | None:
    """[B or 1, L] bool: which tokens of a forward are no padding; None where all are."""
    if now.counted is None:
        return None
    return now.at_slots(now.counted, now.slots(now.past, now.tokens))


def write(model: nn.Module, plan: Plan, sites: list[Site]) -> None:
    """Writes the rows of a plan, and tells each sub-model how long its texts may be."""
    rows = []
    for site, reading, change in zip(sites, plan.readings, plan.changes, strict=True):
        if isinstance(change, TableChange) and isinstance(reading, PositionTable):
            mechanisms.write_rows(model, site, change, reading.reserved, plan.dynamic)
            rows.append((site, change))
    owners = {id(scoped.module): scoped.owner for scoped in scoped_modules(model)}
    for owner in {id(owners[id(site.module)]): owners[id(site.module)] for site, _ in rows}.values():
        mine = [(site, change) for site, change in rows if owners[id(site.module)] is owner]
        reader = reader_for(owner, mine, plan)
        attach(owner, reader, {})
        if isinstance(reader, RowChoice):
            for site, _ in mine:
                mechanisms.holder_of(site.module).chooses = reader.chooses


def reader_for(owner: nn.Module, rows: list[tuple[Site, TableChange]], plan: Plan) -> Reader:
    """What tells the tables of a sub-model of each forward."""
    names = tuple(inspect.signature(owner.forward).parameters)
    limit = min(plan.limit if is_whole(site) else len(change.rows) for site, change in rows)
    module = rows[0][0].module
    padding = getattr(module, "padding_idx", None)
    numbering: dict[str, Any] = {
        "by_keyword": False,
        "limit": limit,
        "padding": padding,
        "by_mask": "attention_mask" in inspect.signature(module.forward).parameters,
        "first": 0 if padding is None else mechanisms.holder_of(module).reserved,
    }
    if not plan.dynamic:
        return Reader([], names, **numbering)
    trained = min(limit - plan.growth[str(site)] for site, _ in rows)
    return RowChoice([], names, **numbering, trained_length=min(trained, plan.trained_length), factor=plan.factor)


def check_longest(model: nn.Module, plan: Plan, sites: list[Site]) -> None:
    """Demands that the model runs on a text of T tokens, where it runs on token ids at all.

    Raises:
        PatchError: it does not.
    """
    runs = probe.run(model, sites, probe.DEPTHS[-1], plan.trained_length) is not None
    if plan.growth and runs and probe.run(model, sites, probe.DEPTHS[-1], plan.target_length) is None:
        raise PatchError(
            f"{type(model).__name__} cannot read {plan.target_length} tokens: something other than its table ends."
        )


def native_kind(model: nn.Module, plan: Plan, sites: list[Site]) -> str | None:
    """How plain transformers loads the tables: from the weights, by computing them itself, or not at all."""
    root = mechanisms.root_model(model)
    saved = set(root.state_dict()) - set(root._keys_to_ignore_on_save or ())
    kinds = []
    for site, change in zip(sites, plan.changes, strict=True):
        if not isinstance(change, TableChange):
            continue
        if f"{site.name}.{site.field}" in saved:
            kinds.append("weights")
        elif change.keeps_short:
            kinds.append("unchanged")
        else:
            return None
    return kinds[0]
