"""Biases by distance in a model: written, or told how long each text is."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from torch import Tensor, nn

from hf_posext import mechanisms
from hf_posext.attention.reading import attach
from hf_posext.attention.scaling import Dynamics
from hf_posext.contract import DistanceChange, Site
from hf_posext.errors import PatchError
from hf_posext.mechanisms import alibi
from hf_posext.mechanisms._scope import scoped_modules
from hf_posext.planning import Plan


@dataclass
class Lengths(Dynamics):
    """The reader of a model whose slopes follow the length.

    Attributes:
        trained_length: N in tokens.
        factor: s, the most that slopes are divided by.
    """

    trained_length: int = 0
    factor: float = 1.0

    def levels_of(self, lengths: Tensor) -> tuple[float, ...]:
        """s at each of some lengths."""
        return tuple((lengths / self.trained_length).clamp(1, self.factor).tolist())

    def scale_at(self, length: int) -> float:
        """As `Dynamics.scale_at`."""
        return min(max(1.0, length / self.trained_length), self.factor)

    def lengths(self) -> Tensor:
        """[B or 1, L] int64: tokens of each row up to and with each one of the present forward.

        Raises:
            PatchError: no forward of the model runs.
        """
        if self.forward is None:
            raise PatchError("An attention layer of a patched model ran outside of the forward of its model.")
        return self.forward.now.token_lengths()


def write(model: nn.Module, plan: Plan, sites: list[Site]) -> None:
    """Divides the distances of a plan, for good or by a factor that follows the length of each text."""
    mine = [site for site, change in zip(sites, plan.changes, strict=True) if isinstance(change, DistanceChange)]
    if not plan.dynamic:
        for site in mine:
            mechanisms.write(site, DistanceChange(plan.factor), plan.target_length)
        return
    owners = {id(scoped.module): scoped.owner for scoped in scoped_modules(model)}
    readers: dict[int, Lengths] = {}
    for site in mine:
        owner = owners[id(site.module)]
        if id(owner) not in readers:
            names = tuple(inspect.signature(owner.forward).parameters)
            readers[id(owner)] = Lengths(
                [], names, by_keyword=False, trained_length=plan.trained_length, factor=plan.factor
            )
            attach(owner, readers[id(owner)], {})
        alibi.follow(site, readers[id(owner)].lengths, plan.trained_length, plan.factor)
