"""What is checked before a run and in its first steps: the patch is in force, and all that is trained learns."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from hf_posext import probe
from hf_posext.errors import PatchError, TrainingError, quoted
from hf_posext.mechanisms import find_sites, is_changed, is_table
from hf_posext.patching import suspended
from hf_posext.records import PatchRecord, record_of

NAMED = 5  # parameters that a message spells out
GRACE = 2  # updates after which every parameter must have had a gradient: the A of LoRA has none until B has moved


def check_patch(model: nn.Module, *, is_control: bool) -> None:
    """Demands that the patch is in force, so that what is learned is learned for it.

    Args:
        model: the model that is about to be trained.
        is_control: whether a model that is not patched is meant to be trained.

    Raises:
        PatchError: there is no patch, one that is recorded and not in force, or one in a control.
    """
    record = record_of(model)
    if record is not None and is_control:
        raise PatchError(f"A control has no patch, and the model has {record.describe()}. Leave out `control_length`.")
    if record is None:
        if is_control:
            return
        raise PatchError(
            "The model is not patched, so it would learn nothing about positions beyond those that it knows. Give the "
            "config a `patch`, or call `patch_model` first; for a control without one give `control_length`."
        )
    if record.native != "unchanged" and not is_in_force(model, record):
        raise PatchError(
            f"{record.describe()} is recorded and not in force: something has replaced the modules of the model since. "
            "Load the model anew and patch it."
        )


def is_in_force(model: nn.Module, record: PatchRecord) -> bool:
    """Whether the model computes something else than it does without its patch, for tokens spread over T."""
    sites = [site for site in find_sites(model) if str(site) in record.sites]
    if any(map(is_table, sites)):  # without the patch it has no rows as far out
        return all(map(is_changed, sites))
    now = probe.run(model, sites, probe.DEPTHS[-1], record.target_length)
    with suspended(model):
        before = probe.run(model, find_sites(model), probe.DEPTHS[-1], record.target_length)
    return now is None or before is None or not torch.equal(now, before)


class GradientCheck(TrainerCallback):
    """Demands that every trained parameter gets a finite gradient, and one that is not zero within the first updates.

    The B of LoRA begins at zero, so its A has a gradient only after an update with a learning rate. Parameters that
    DeepSpeed keeps elsewhere have no gradient to look at and are left out.
    """

    def __init__(self) -> None:
        self.waiting: set[str] | None = None
        self.updates = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Looks at the gradients of one update.

        Raises:
            TrainingError: a parameter that does not learn, or a gradient that is not finite.
        """
        if self.waiting is not None and not self.waiting:
            return
        named = dict(kwargs["model"].named_parameters())
        trained = {name: each for name, each in named.items() if each.requires_grad and not hasattr(each, "ds_id")}
        self.waiting = set(trained) if self.waiting is None else self.waiting
        largest = {name: reach(trained[name].grad) for name in sorted(self.waiting)}  # in one order in all processes
        broken = [name for name, value in largest.items() if value is not None and not torch.isfinite(value)]
        if broken and args.fp16:  # the loss scale is still being found, and leaves such an update out
            return
        if broken:
            raise TrainingError(
                f"The gradient of {some(broken)} is not finite in step {state.global_step + 1}. Lower "
                "`training.learning_rate`, or train in bf16 or fp32."
            )
        self.waiting -= {name for name, value in largest.items() if value is not None and value > 0}
        if self.waiting and self.updates >= GRACE - 1:
            raise TrainingError(
                f"{some(sorted(self.waiting))} should be trained, but no gradient has reached it in {self.updates + 1} "
                "updates. Reentrant gradient checkpointing and text of at most N tokens under an adapter that is off "
                "there do this; or leave it out of what is trained."
            )
        self.updates += any(group["lr"] > 0 for group in kwargs["optimizer"].param_groups)


def reach(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The largest number of a gradient, over all processes where it is sharded; None without one."""
    if gradient is None:
        return None
    whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return whole.detach().abs().max()


def some(names: list[str]) -> str:
    """The first names of a list, and how many there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{quoted(names[:NAMED])}{more}"
