"""Writes a plan into a model and takes it out again: sites, softmax scaling, config fields and the record."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from torch import nn

from hf_posext import distances, dynamic, in_attention, mechanisms, static, tables
from hf_posext.attention import interface, reading
from hf_posext.configs import ConfigUndo, config_parts, fields_before
from hf_posext.contract import BucketedBias, Site, TableChange
from hf_posext.errors import PatchError, quoted
from hf_posext.freezing import FrozenGenerate
from hf_posext.lengths import length_fields, original_length, side_fields
from hf_posext.mechanisms import logits
from hf_posext.planning import Plan
from hf_posext.records import CONFIG_FIELD, PatchRecord

STATE = "_posext_state"
NOTE = "plain transformers has no words for `{method}` and {what}; hf_posext.load_pretrained brings the patch back"
OWN = (*reading.OWN, mechanisms.OLD_ROWS)  # last names of what patches add to the weights


@dataclass
class PatchState:
    """What a patched model keeps to go back: on the outermost transformers model, so that copies keep their own."""

    configs: ConfigUndo = field(default_factory=ConfigUndo)
    tokenizers: list[tuple[Any, Any]] = field(default_factory=list)


def write(model: nn.Module, sites: list[Site], plan: Plan, earlier: PatchRecord | None) -> None:
    """Writes sites, softmax scaling, length fields, `rope_parameters` and the record."""
    root = mechanisms.root_model(model)
    undo = root.__dict__.setdefault(STATE, PatchState()).configs
    before = earlier.before if earlier else fields_before(root)
    first = earlier.original_max_position_embeddings if earlier else original_length(root.config, plan.trained_length)
    set_lengths(model, plan, undo)
    if not plan.is_active:
        native_kind = "unchanged"
    elif plan.dynamic:
        native_kind = None
        follow(model, plan, sites)
        if plan.scale == "frozen":
            root.__dict__["generate"] = FrozenGenerate(root)
    elif plan.acts_in_attention:
        native_kind = None
        in_attention.install(model, plan, sites)
    else:
        native_kind = static.write(model, plan, sites, undo, first)
    native_kind = native_kind if earlier is None or earlier.native else None
    record = PatchRecord(
        method=plan.method.name,
        options=plan.options,
        factor=plan.factor,
        trained_length=plan.trained_length,
        target_length=plan.target_length,
        original_max_position_embeddings=first,
        total_factor=plan.target_length / first,
        layers=plan.layers,
        dynamic=plan.dynamic,
        scale=plan.scale,
        sites=[str(site) for site in sites],
        mechanisms=[site.mechanism for site in sites],
        native=native_kind,
        note="" if native_kind else note_on(plan),
        own=[name for name in OWN if any(name in {*each._parameters, *each._buffers} for each in root.modules())],
        before=before,
        previous=[{**step.to_dict(), "previous": []} for step in earlier.steps()] if earlier else [],
        version=version("hf_posext"),
    )
    undo.set(root.config, **{CONFIG_FIELD: record.to_dict()})


def note_on(plan: Plan) -> str:
    """What a reader of the config should know where plain transformers cannot load the patch."""
    kept = TableChange if plan.dynamic else BucketedBias
    has_rows = any(isinstance(change, kept) for change in plan.changes)
    what = "reads every text with the longer table" if has_rows else "loads the model as it was before"
    return NOTE.format(method=plan.method.name, what=what)


def follow(model: nn.Module, plan: Plan, sites: list[Site]) -> None:
    """Makes the sites of a plan follow the length of the text.

    Raises:
        PatchError: sites of several mechanisms, or attention that cannot follow.
    """
    if len({type(change) for change in plan.changes}) > 1:
        raise PatchError(
            f"{type(model).__name__} encodes position in several ways ({quoted(plan.names)}), which cannot follow the "
            "length together. Patch with dynamic=False."
        )
    if plan.spectra:
        dynamic.install(model, plan, sites)
    elif isinstance(plan.changes[0], TableChange):
        tables.write(model, plan, sites)
    else:
        distances.write(model, plan, sites)


def set_lengths(model: nn.Module, plan: Plan, undo: ConfigUndo) -> None:
    """Raises the length fields of all text configs: to T, or by as much as the tables grow whose size they are."""
    rows = [site for site in mechanisms.find_sites(model) if mechanisms.has_rows(site)]
    if not all(str(site) in plan.names for site in rows):
        return  # the field is the size of a table that stays
    if not rows:
        for config in config_parts(model):
            undo.set(config, **dict.fromkeys(length_fields(config), plan.target_length))
        return
    claimed = {name: plan.growth[str(site)] for site in rows for name in mechanisms.size_fields(site)}
    more = max(plan.growth.values())
    for config in config_parts(model):
        grown = {name: claimed.get(name, more) for name in length_fields(config)}
        grown |= {name: claimed[name] for name in side_fields(config) if name in claimed}
        undo.set(config, **{name: getattr(config, name) + growth for name, growth in grown.items()})


def remove(model: nn.Module) -> None:
    """Gives sites, softmax scaling and config fields back what they were; nothing to do on an unpatched model."""
    state = mechanisms.root_model(model).__dict__.pop(STATE, None)
    if state is not None:
        reading.detach(model)
        interface.give_back(config_parts(model))
        mechanisms.root_model(model).__dict__.pop("generate", None)
        state.configs.give_back()  # first, since a module that was patched on meta is restored from its config
    for site in mechanisms.find_sites(model):
        mechanisms.restore(site)
    mechanisms.shrink_columns(model)
    logits.restore(model)


def state_of(model: nn.Module) -> PatchState:
    """The state of a patched model."""
    return mechanisms.root_model(model).__dict__[STATE]
