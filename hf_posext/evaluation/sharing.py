"""Which passes can be read from others: those of the same tokens, or that begin with the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_posext.evaluation.windows import Pass
from hf_posext.mechanisms import find_root, find_sites, has_rows
from hf_posext.mechanisms.rotary import LENGTH_DEPENDENT, rope_type
from hf_posext.records import record_of


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


def shared(passes: Sequence[Pass], *, beginnings: bool = False) -> list[Run]:
    """As few runs as serve all passes, in the order in which they are first needed.

    Args:
        passes: what is to be read.
        beginnings: whether a pass is also read from another that begins with its tokens. A causal model reads both
            alike, but to rounding only, since kernels cut longer input elsewhere; what is read from a pass of the same
            tokens is equal to the last bit.
    """
    keys = [window.fed.numpy().tobytes() for window in passes]
    members: dict[int, list[int]] = {}
    owner = -1
    # In this order whatever begins with a text stands right before it, equal texts from the first on.
    for index in sorted(range(len(keys)), key=lambda index: (keys[index], -index), reverse=True):
        serves = owner >= 0 and (keys[owner].startswith(keys[index]) if beginnings else keys[owner] == keys[index])
        owner = owner if serves else index
        members.setdefault(owner, []).append(index)
    runs = [
        Run(passes[owner].fed, tuple((index, passes[index]) for index in sorted(served)))
        for owner, served in members.items()
    ]
    return sorted(runs, key=lambda run: run.members[0][0])


def follows_length(model: nn.Module) -> bool:
    """Whether every token is read by the length of the whole input, as no cache can follow.

    It is so with the checkpoint types `dynamic` and `longrope` of transformers, which turn all keys, and with our
    `dynamic=True` on a table, which is chosen for a whole row. On other encodings ours goes by the token that reads.
    """
    if find_root(model) is None:
        return False
    record = record_of(model)
    is_dynamic = record is not None and record.dynamic
    return any(
        rope_type(site) in LENGTH_DEPENDENT if site.mechanism == "rotary" else is_dynamic and has_rows(site)
        for site in find_sites(model)
    )
