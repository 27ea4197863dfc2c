"""Dynamic scaling of a model: built from a plan, and proved on the model at hand before a patch counts as done."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_posext import mechanisms, probe
from hf_posext.attention import interface
from hf_posext.attention.reading import attach
from hf_posext.attention.scaling import Dynamics, turnings
from hf_posext.attention.schedule import Schedule, steps_for
from hf_posext.attention.turns import Turning
from hf_posext.configs import config_parts
from hf_posext.contract import RotaryChange, Site, Spectrum
from hf_posext.errors import PatchError
from hf_posext.layouts import find_layouts
from hf_posext.mechanisms import logits
from hf_posext.mechanisms._scope import scoped_modules
from hf_posext.planning import Plan

CHECKED_SCALE = 3.0


def schedule_of(site: Site, spectrum: Spectrum, plan: Plan) -> Schedule:
    """How a method makes the frequencies of one site follow the length.

    The method is traced once with a symbol for the scale: everything that depends on the spectrum alone is computed
    now, and what is left is a few tensor operations that run on any device and under a compiler.

    Raises:
        PatchError: the method asks what number the scale is, so it cannot follow a tensor of lengths.
    """
    method, limit, options = plan.method, plan.factor, plan.options
    base = mechanisms.read_short(site, spectrum)
    if method.follows_length(options):
        at_n = method.change(site.mechanism, spectrum, 1.0, limit, options)
        base = base * (at_n.inv_freq / spectrum.inv_freq).nan_to_num(1.0)

    def changes(scale: Any) -> tuple[Any, Any, Any]:
        change = method.change(site.mechanism, spectrum, scale, limit, options)
        return change.inv_freq, change.attention_scaling, change.logit_scale

    changes.__annotations__.clear()  # the tracer would keep them as strings, which cannot be pickled
    try:
        traced = torch.fx.symbolic_trace(changes)
    except (torch.fx.proxy.TraceError, TypeError) as error:
        raise PatchError(
            f"`{method.name}` cannot follow the length of the text: its function asks for the value of the factor "
            f"({error}). Write it in tensor operations, or patch with dynamic=False."
        ) from error
    most = method.change(site.mechanism, spectrum, limit, limit, options)
    return Schedule(
        name=str(site),
        base=base,
        spectrum=spectrum,
        changes=traced,
        scaling=spectrum.attention_scaling,
        trained_length=spectrum.trained_length,
        switch_length=mechanisms.short_length(site) or spectrum.trained_length,
        limit=limit if method.is_bounded else math.inf,
        scales_logits=float(most.logit_scale) != 1,
        steps=steps_for(spectrum.trained_length),
    )


def install(model: nn.Module, plan: Plan, sites: list[Site]) -> None:
    """Makes the sites follow the length of the text.

    Raises:
        PatchError: attention that does not go through transformers' registry, or a layout that is not understood.
    """
    schedules: dict[str, Schedule] = {}
    for site, spectrum in zip(sites, plan.spectra, strict=True):
        known = next((each for each in schedules.values() if is_same(each, site, spectrum)), None)
        schedules[str(site)] = known or schedule_of(site, spectrum, plan)
    configs = config_parts(model)
    interface.choose(configs)
    scoped = {id(each.module): each.owner for each in scoped_modules(model)}
    owners = {id(scoped[id(site.module)]): scoped[id(site.module)] for site in sites}
    for owner in owners.values():
        mine = [site for site in sites if scoped[id(site.module)] is owner]
        layouts, by_keyword = find_layouts(owner, mine)
        for site in mine:
            schedule = schedules[str(site)]  # frequencies for short text, where no cast or loading can replace them
            mechanisms.write(site, RotaryChange(schedule.base, schedule.scaling), plan.target_length)
        here = {str(site): schedules[str(site)] for site in mine}
        names = tuple(inspect.signature(owner.forward).parameters)
        dynamics = Dynamics(configs, names, by_keyword, schedules=here)
        attach(
            owner,
            dynamics,
            {
                module: Turning(layout, schedules[str(site)], bool(getattr(module, "is_causal", True)), dynamics)
                for module, (site, layout) in layouts.items()
            },
        )


def run_fixed(model: nn.Module, plan: Plan, sites: list[Site], depth: str, reach: int) -> Tensor | None:
    """What comes out of the model where the whole method is in force with a fixed factor, the `checked_scale`."""
    scale = checked_scale(plan)
    held = [mechanisms.holder_of(site.module) is not None for site in sites]
    changes = [
        plan.method.change(site.mechanism, spectrum, scale, plan.factor, plan.options)
        for site, spectrum in zip(sites, plan.spectra, strict=True)
    ]
    try:
        for site, change in zip(sites, changes, strict=True):
            mechanisms.write(site, change, plan.trained_length)
        if float(changes[0].logit_scale) != 1:
            logits.write(model, sites, float(changes[0].logit_scale))
        return probe.run(model, sites, depth, reach)
    finally:
        logits.restore(model)
        for site, spectrum, was_held in zip(sites, plan.spectra, held, strict=True):
            if was_held:
                own = RotaryChange(spectrum.inv_freq, spectrum.attention_scaling)
                mechanisms.write(site, own, plan.trained_length)
            else:
                mechanisms.restore(site)


def checked_scale(plan: Plan) -> float:
    """The scale at which dynamic scaling is compared with a fixed factor."""
    return min(CHECKED_SCALE, plan.factor) if plan.method.is_bounded else CHECKED_SCALE


def check(
    model: nn.Module, plan: Plan, sites: list[Site], depth: str, reach: int, short: Tensor | None, long: Tensor | None
) -> None:
    """Demands that short text is untouched and that text at some scale is read as with that factor fixed.

    Args:
        model: with dynamic scaling in force.
        plan: of the patch.
        sites: its sites.
        depth: how far the outputs to compare with ran.
        reach: tokens up to which the model must be as before, as `short_reach` before the patch.
        short: output of the unpatched model for a few tokens within N.
        long: output of `run_fixed`; None for either where the model cannot run on token ids alone.

    Raises:
        NoEffectError: the fixed factor changes nothing.
        PatchError: any difference for short text, or more than rounding for long text.
    """
    probe.check_effect(short, long, plan.words, depth)
    if short is None or long is None:
        return
    now = probe.run(model, sites, depth, reach)
    if now is None or (keeps_short(plan) and not torch.equal(now, short)):
        raise PatchError(
            f"Short text is not read as before by {type(model).__name__}: dynamic scaling would change it."
        )
    with at_scale(model, checked_scale(plan)):
        now = probe.run(model, sites, depth, reach)
    effect = float((long - short).abs().max())
    allowed = effect * (0.02 + 32 * torch.finfo(long.dtype).eps)
    if now is None or float((now - long).abs().max()) > allowed:
        raise PatchError(
            f"{type(model).__name__} with a factor that follows the length does not compute what it computes with the "
            "same factor fixed: something other than its attention uses the rotation. Patch with dynamic=False."
        )


def keeps_short(plan: Plan) -> bool:
    """Whether the method leaves text of at most N tokens as it is; a list for short text is meant to change it."""
    if not plan.method.follows_length(plan.options):
        return True
    at_n = [
        plan.method.change(site.mechanism, spectrum, 1.0, plan.factor, plan.options)
        for site, spectrum in zip(plan.sites, plan.spectra, strict=True)
    ]
    return all(change.is_identity(spectrum) for change, spectrum in zip(at_n, plan.spectra, strict=True))


@contextmanager
def at_scale(model: nn.Module, scale: float) -> Iterator[None]:
    """Dynamic scaling as for a text so long that the scale is `scale`, for the length of a block."""
    schedules = {id(each.schedule): each.schedule for each in turnings(model)}.values()
    kept = [(each.trained_length, each.switch_length, each.limit) for each in schedules]
    for each in schedules:
        each.trained_length, each.switch_length, each.limit = 1e-6, 0, scale
    try:
        yield
    finally:
        for each, values in zip(schedules, kept, strict=True):
            each.trained_length, each.switch_length, each.limit = values


def is_same(schedule: Schedule, site: Site, spectrum: Spectrum) -> bool:
    """Whether a site follows the same schedule as another, so that they can share tables."""
    return (
        torch.equal(schedule.spectrum.inv_freq, spectrum.inv_freq)
        and torch.equal(schedule.base, mechanisms.read_short(site, spectrum))
        and schedule.spectrum.attention_scaling == spectrum.attention_scaling
        and schedule.spectrum.base == spectrum.base
    )


def short_reach(plan: Plan) -> int:
    """Tokens up to which the model must be as before: N, or less where the checkpoint itself switches before."""
    return min(mechanisms.short_length(site) or plan.trained_length for site in plan.sites)
