"""A model's own head on a few rows at a time, by the model's own `forward`.

The backbone is the module between the token ids and the head. It runs once; after that the model's `forward` runs again
for some rows of its output, with the backbone answering what it is told to. So all that the model does to hidden states
is kept (soft caps, logit scales, biases, adapters on the head), and no class of models has to be known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hf_posext.errors import PatchError
from hf_posext.evaluation.forwards import logits_of, probe_ids

Result = TypeVar("Result")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Where torch keeps the hooks of a module."""


def find_backbone(network: nn.Module) -> nn.Module | None:
    """The module between the token ids and the head, if the head can be run on single rows of its output; else None.

    A candidate counts only if it proves itself: its output rows, given to the model's own head in reverse order, must
    give the logits of the direct pass in reverse order.
    """
    ids = torch.stack(probe_ids(network))
    direct = logits_of(network, ids)
    rows = torch.tensor([1, 0])
    for candidate in _candidates(network):
        outputs, _ = run_backbone(candidate, lambda: logits_of(network, ids))
        if outputs is None:
            continue
        hidden = rows_of(outputs, rows)
        try:
            swapped = run_head(candidate, outputs, hidden, lambda: logits_of(network, ids))
        except PatchError:  # a gated adapter on the head has to know which tokens it is given
            continue
        if swapped.shape == direct.shape and (swapped - direct[rows]).abs().max() <= 0.01 * direct.abs().max():
            return candidate
    return None


def run_backbone(backbone: nn.Module, forward: Callable[[], Result]) -> tuple[Any, Result]:
    """Runs a model up to its hidden states.

    Args:
        backbone: the module whose output its head reads.
        forward: calls the model.

    Returns:
        What the backbone returned, None if it was never called; and what the model made of none of its rows.
    """
    own_forward = backbone.forward
    returned: list[Any] = [None]

    def run(*args: Any, **kwargs: Any) -> Any:
        returned[0] = own_forward(*args, **kwargs)
        return _with_hidden(returned[0], returned[0][0].flatten(0, 1)[None, :0])

    with replaced(backbone, forward=run):
        result = forward()
    return returned[0], result


def run_head(backbone: nn.Module, outputs: Any, hidden: Tensor, forward: Callable[[], Result]) -> Result:
    """What a model makes of some rows of hidden states.

    Args:
        backbone: the module whose output its head reads; it does not run, and so none of its hooks does.
        outputs: what it returned, for all but the hidden states.
        hidden: [rows, hidden], read as one sequence.
        forward: calls the model.
    """
    shown = _with_hidden(outputs, hidden[None])
    with replaced(backbone, forward=lambda *args, **kwargs: shown, **{name: {} for name in HOOKS}):
        return forward()


def rows_of(outputs: Any, rows: Tensor) -> Tensor:
    """Hidden states [rows, hidden] of a backbone's output; `rows` are indices into the flattened batch."""
    hidden = outputs[0].flatten(0, 1)  # [B * L, hidden]
    return hidden[rows.to(hidden.device)]


@contextmanager
def replaced(module: nn.Module, **attributes: Any) -> Iterator[None]:
    """Other attributes, `forward` among them, on this instance for as long as the block runs."""
    before = {name: vars(module)[name] for name in attributes if name in vars(module)}
    vars(module).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            vars(module).pop(name, None)
        vars(module).update(before)


def _candidates(network: Any) -> list[nn.Module]:
    """Modules that may be the backbone: the base model, and the decoder inside it, which OPT and BART call directly."""
    base = getattr(network, "base_model", network)
    decoder = network.get_decoder() if hasattr(network, "get_decoder") else None
    return [module for module in (base, decoder) if module is not None and module is not network]


def _with_hidden(outputs: Any, hidden: Tensor) -> Any:
    """A copy of a backbone's output whose first entry, the last hidden state, is another one."""
    if isinstance(outputs, tuple):
        return (hidden, *outputs[1:])
    entries = dict(outputs)
    return type(outputs)(**{**entries, next(iter(entries)): hidden})
