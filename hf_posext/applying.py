"""Applies a plan: sites -> changes -> write -> record -> probe, or all back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_posext import dynamic, images, mechanisms, probe, recovery, tables
from hf_posext.attention import reading
from hf_posext.attention.scaling import Dynamics
from hf_posext.configs import OwnConfigs, own_configs
from hf_posext.contract import Remap, Site, Window
from hf_posext.errors import PatchError
from hf_posext.planning import Plan, make_plan
from hf_posext.records import PatchRecord, record_of
from hf_posext.writing import remove, state_of, write


@dataclass
class Trained:
    """What of a patch can be trained: rows of tables, and parameters that it has added to modules.

    `lost` are the modules of tables whose rows before the patch are not known.
    """

    rows: recovery.Rows = field(default_factory=list)
    parameters: list[tuple[nn.Module, str, nn.Parameter]] = field(default_factory=list)
    lost: list[nn.Module] = field(default_factory=list)


def trained_by(model: nn.Module) -> Trained:
    """What training may have changed of the patch of a model."""
    lost = [site.module for site in recovery.lost_tables(model)]
    return Trained(recovery.live_rows(model), reading.own_parameters(model), lost)


def apply(model: nn.Module, plan: Plan) -> None:
    """Writes a plan and proves that it acts; puts everything back if anything fails.

    Raises:
        PatchError: the patch has no effect, or a module does not follow its buffer.
    """
    earlier = record_of(model)
    tokenizers = state_of(model).tokenizers if earlier else []
    trained = trained_by(model) if earlier else Trained()
    reach = probed_length(model, plan)
    for depth in probe.DEPTHS:
        # A patched model has its own copies already, and its undo knows them.
        configs = OwnConfigs([]) if earlier else own_configs(model)
        try:
            baseline = probe.run(model, plan.sites, depth, reach) if plan.is_active and reach else None
            sites = [site for site in mechanisms.find_sites(model) if str(site) in plan.names]
            turns = plan.dynamic and plan.is_active and bool(plan.spectra)
            fixed = dynamic.run_fixed(model, plan, sites, depth, reach) if turns else None
            write(model, sites, plan, earlier)
            if turns:
                dynamic.check(model, plan, sites, depth, reach, baseline, fixed)
            elif plan.is_active:
                prove(model, plan, sites, depth, reach, baseline)
            return
        except BaseException as error:
            remove(model)
            configs.give_back()
            if earlier is not None:
                replay(model, earlier, tokenizers, trained)
            if not (isinstance(error, probe.NoEffectError) and depth != probe.DEPTHS[-1]):
                raise


def prove(model: nn.Module, plan: Plan, sites: list[Site], depth: str, reach: int, before: Tensor | None) -> None:
    """Demands that a patch that was written changes what the model computes, and only what it says that it changes.

    Args:
        model: with the patch in force.
        plan: of the patch.
        sites: its sites.
        depth: how far the outputs to compare ran.
        reach: tokens over which the positions of the probe are spread, 0 for none.
        before: what came out of the unpatched model; None where it cannot run on token ids alone.

    Raises:
        NoEffectError: nothing changes.
        PatchError: a module that does not do what it was given, or short text that is not read as before.
    """
    if plan.is_for_images:
        images.check(model, plan, sites, depth, before)
        return
    rotary, _, changes = plan.rotary(sites)
    probe.check_turns(rotary, changes)
    after = probe.run(model, sites, depth, reach) if reach else None
    if plan.keeps_short:
        if before is not None and (after is None or not torch.equal(before, after)):
            raise PatchError(f"Short text is not read as before by {type(model).__name__}: the patch would change it.")
        tables.check_longest(model, plan, sites)
        with reading_as_long(model, plan.target_length) as follows:
            after = probe.run(model, sites, depth, reach) if follows else None
    probe.check_effect(before, after, plan.words, depth)


@contextmanager
def reading_as_long(model: nn.Module, length: int) -> Iterator[bool]:
    """Every text is read as one of a given length for the length of a block; False where none would be."""
    following = [reader for reader in reading.readers(model) if isinstance(reader, Dynamics)]
    for each in following:
        each.fixed = torch.tensor([length])
    try:
        yield bool(following)
    finally:
        for each in following:
            each.fixed = None


def probed_length(model: nn.Module, plan: Plan) -> int:
    """Tokens over which the positions of a probe are spread, or pixels per side: as many as show the method.

    0 where the model cannot read so many, since a table ends before.
    """
    if plan.is_for_images:
        return plan.target_length
    if plan.window is not None and any(map(mechanisms.has_rows, mechanisms.find_sites(model))):
        return 0
    if plan.dynamic and plan.spectra:
        return dynamic.short_reach(plan)
    is_beyond_window = any(isinstance(change, Remap | Window) for change in (*plan.changes, plan.window))
    return 2 * plan.target_length if is_beyond_window else plan.trained_length


def replay(
    model: nn.Module,
    record: PatchRecord,
    tokenizers: Iterable[tuple[Any, Any]] = (),
    trained: Trained | None = None,
) -> None:
    """Patches an unpatched model as a record says, step by step.

    Args:
        model: the model.
        record: the patch.
        tokenizers: those that unpatching gives back.
        trained: what had been trained of the patch when it was taken off.
    """
    for step in record.steps():
        how = step.layers, step.options, step.dynamic, step.scale
        apply(model, make_plan(model, step.method, step.factor, None, step.trained_length, *how))
    state_of(model).tokenizers = list(tokenizers)
    if trained is not None:
        recovery.put_back(trained.rows)
        for module, name, parameter in trained.parameters:
            module._parameters[name] = parameter
        for module in trained.lost:
            mechanisms.holder_of(module).is_lost = True
