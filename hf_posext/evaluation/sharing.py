"""Which passes can be read from others: those that begin with the same tokens, where a model reads these alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_posext.evaluation.forwards import causal_lm, sees_ahead
from hf_posext.evaluation.windows import Pass
from hf_posext.mechanisms import find_root, find_sites
from hf_posext.mechanisms.rotary import LENGTH_DEPENDENT, rope_type


@dataclass(frozen=True)
class Run:
    """One run of a model, from which several passes are read.

    Attributes:
        fed: token ids of the longest of them, int64 [L].
        members: (index of the pass, the pass) of each.
    """

    fed: Tensor
    members: tuple[tuple[int, Pass], ...]

    @property
    def rows(self) -> Tensor:
        """Indices into `fed` of the tokens whose logits are scored, pass after pass, int64 [targets]."""
        return torch.cat([window.rows for _, window in self.members])

    @property
    def targets(self) -> Tensor:
        """The token ids that they are scored against, int64 [targets]."""
        return torch.cat([window.targets for _, window in self.members])


def alone(passes: Sequence[Pass]) -> list[Run]:
    """A run for each pass."""
    return [Run(window.fed, ((index, window),)) for index, window in enumerate(passes)]


def shared(passes: Sequence[Pass]) -> list[Run]:
    """As few runs as serve all passes: one whose tokens are the beginning of another's has no run of its own."""
    groups: dict[bytes, list[int]] = defaultdict(list)
    shortest = min((len(window.fed) for window in passes), default=0)
    for index, window in enumerate(passes):
        groups[window.fed[:shortest].numpy().tobytes()].append(index)
    members: dict[int, list[int]] = {}
    for group in groups.values():
        longest_first = sorted(group, key=lambda index: len(passes[index].fed), reverse=True)
        owners: list[int] = []
        for index in longest_first:
            fed = passes[index].fed
            owner = next((other for other in owners if torch.equal(passes[other].fed[: len(fed)], fed)), index)
            owners += [owner] if owner == index else []
            members.setdefault(owner, []).append(index)
    return [
        Run(passes[owner].fed, tuple((index, passes[index]) for index in sorted(indices)))
        for owner, indices in sorted(members.items())
    ]


def reads_beginnings_alike(model: nn.Module) -> bool:
    """Whether a token is read alike whatever follows it, so that a short text can be read from a longer one.

    It is not where attention looks ahead, which is measured, nor where a checkpoint's own type turns all keys by the
    length of the whole input (`dynamic` and `longrope` of transformers). A patch of ours goes by the token that reads.
    """
    return not sees_ahead(causal_lm(model)) and not follows_length(model)


def follows_length(model: nn.Module) -> bool:
    """Whether a checkpoint's own type turns all keys by the length of the input, as no cache can follow."""
    if find_root(model) is None:
        return False
    return any(site.mechanism == "rotary" and rope_type(site) in LENGTH_DEPENDENT for site in find_sites(model))
