"""patch_model, unpatch_model, patched: sites -> method -> changes -> write -> record -> probe, or all back."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, TypeVar

import torch
from torch import nn

from hf_posext import dynamic as dynamics
from hf_posext import in_attention, mechanisms, probe, static
from hf_posext.arguments import check_flag
from hf_posext.attention import interface, reading
from hf_posext.configs import ConfigUndo, OwnConfigs, config_parts, fields_before, own_configs, set_fields
from hf_posext.contract import Remap, Site, Spectrum, Window
from hf_posext.errors import PatchError
from hf_posext.freezing import FrozenGenerate
from hf_posext.lengths import length_fields, original_length, stated_length
from hf_posext.mechanisms import logits
from hf_posext.planning import Plan, make_plan
from hf_posext.records import CONFIG_FIELD, PatchRecord, record_of

logger = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)
STATE = "_posext_state"
NOTE = (
    "plain transformers has no words for `{method}` and loads the model as it was before; hf_posext.load_pretrained "
    "brings the patch back"
)


@dataclass
class PatchState:
    """What a patched model keeps to go back: on the outermost transformers model, so that copies keep their own."""

    configs: ConfigUndo = field(default_factory=ConfigUndo)
    tokenizers: list[tuple[Any, Any]] = field(default_factory=list)


def patch_model(
    model: Model,
    method: str = "yarn",
    factor: float | None = None,
    *,
    target_length: int | None = None,
    original_max_position_embeddings: int | None = None,
    dynamic: bool = False,
    scale: str = "live",
    layers: str = "full",
    tokenizer: Any = None,
    compose: bool = False,
    **options: Any,
) -> Model:
    """Changes how a loaded model encodes position, in place and reversibly.

    Args:
        model: a transformers model, also inside PEFT or another wrapper.
        method: name or alias of a method, see `list_methods`.
        factor: s = T / N, a finite number >= 1, relative to the model as given; 1 changes no bit of any output.
        target_length: T in tokens, in place of `factor`.
        original_max_position_embeddings: N in tokens, where the config does not say it or says it wrong.
        dynamic: the factor follows the length l, s = max(1, l / N) in 8 to 32 steps per doubling up to `factor`: l of
            each token in causal models (its position + 1, padding left out), of each row in encoders. Text of at most
            N tokens is read as by the unpatched model, to the last bit, and decoding with a cache equals one full pass.
            `dynamic_ntk`, and `longrope` with two lists, are dynamic by nature.
        scale: with `dynamic`, "live" or "frozen": one scale for a call of `generate`, that of prompt and new tokens.
        layers: "full" leaves the layers with a sliding window alone, "all" stretches both kinds.
        tokenizer: its `model_max_length` is raised to T.
        compose: patch on top of a patch; without it a patched model is refused.
        options: the method's own, see `list_methods`.

    Returns:
        The same model.

    Raises:
        TypeError, ValueError: a bad argument; the message says what came, what is allowed and what to do.
        NoSiteError: the model has no place where the method has a meaning.
        PatchError: the model cannot be patched safely. In every case it is left exactly as it was.
    """
    check_flag("dynamic", dynamic)
    ensure_adopted(model)
    earlier = record_of(model)
    plan = make_plan(
        model, method, factor, target_length, original_max_position_embeddings, layers, options, dynamic, scale
    )
    if earlier is not None and not compose:
        raise PatchError(
            f"The model is already patched: {earlier.describe()}. Call `unpatch_model` first, or give compose=True to "
            "patch on top of it."
        )
    if earlier is not None and (reading.readers(model) or any(map(mechanisms.is_off, mechanisms.find_sites(model)))):
        reason = "its factor follows the length" if earlier.dynamic else "it is more than other frequencies"
        raise PatchError(f"Nothing can be put on top of {earlier.describe()}: {reason}. Unpatch first.")
    apply(model, plan)
    if plan.is_active and plan.method.needs_tuning:
        logger.info("A model that was trained with another encoding needs tuning after `%s`.", plan.method.name)
    if tokenizer is not None:
        state_of(model).tokenizers.append((tokenizer, tokenizer.model_max_length))
        tokenizer.model_max_length = plan.target_length
    return model


def unpatch_model(model: Model) -> Model:
    """Takes all patches off: logits, config, classes, buffers and state-dict keys are as before, bit for bit.

    Returns:
        The same model; one that is not patched is returned as it is.
    """
    ensure_adopted(model)
    if record_of(model) is not None:
        for tokenizer, length in reversed(state_of(model).tokenizers):
            tokenizer.model_max_length = length
        remove(model)
    return model


@contextmanager
def patched(model: Model, method: str = "yarn", factor: float | None = None, **arguments: Any) -> Iterator[Model]:
    """`patch_model` for the length of a with-block; unpatched on the way out, also after an error."""
    patch_model(model, method, factor, **arguments)
    try:
        yield model
    finally:
        unpatch_model(model)


@contextmanager
def suspended(model: Model) -> Iterator[Model]:
    """The model without its patch for the length of a with-block; the patch is put back on the way out."""
    ensure_adopted(model)
    record = record_of(model)
    if record is None:
        yield model
        return
    tokenizers, trained = state_of(model).tokenizers, reading.own_parameters(model)
    remove(model)
    try:
        yield model
    finally:
        replay(model, record, tokenizers)
        for module, parameter in trained.items():
            module._parameters[reading.SLOPES] = parameter


def apply(model: nn.Module, plan: Plan) -> None:
    """Writes a plan and proves that it acts; puts everything back if anything fails.

    Raises:
        PatchError: the patch has no effect, or a module does not follow its buffer.
    """
    earlier = record_of(model)
    tokenizers = state_of(model).tokenizers if earlier else []
    reach = probed_length(model, plan)
    for depth in probe.DEPTHS:
        # A patched model has its own copies already, and its undo knows them.
        configs = OwnConfigs([]) if earlier else own_configs(model)
        try:
            baseline = probe.run(model, plan.sites, depth, reach) if plan.is_active and reach else None
            sites = [site for site in mechanisms.find_sites(model) if str(site) in plan.names]
            fixed = dynamics.run_fixed(model, plan, sites, depth, reach) if plan.dynamic and plan.is_active else None
            write(model, sites, plan, earlier)
            if plan.is_active and plan.dynamic:
                dynamics.check(model, plan, sites, depth, reach, baseline, fixed)
            elif plan.is_active:
                rotary, _, changes = plan.rotary(sites)
                probe.check_turns(rotary, changes)
                after = probe.run(model, sites, depth, reach) if reach else None
                probe.check_effect(baseline, after, plan.words, depth)
            return
        except BaseException as error:
            remove(model)
            configs.give_back()
            if earlier is not None:
                replay(model, earlier, tokenizers)
            if not (isinstance(error, probe.NoEffectError) and depth != probe.DEPTHS[-1]):
                raise


def probed_length(model: nn.Module, plan: Plan) -> int:
    """Tokens over which the positions of a probe are spread: as many as it takes to see the method act.

    0 where the model cannot read so many, since a table ends before.
    """
    if plan.window is not None and any(map(mechanisms.has_rows, mechanisms.find_sites(model))):
        return 0
    if plan.dynamic:
        return dynamics.short_reach(plan)
    is_beyond_window = any(isinstance(change, Remap | Window) for change in (*plan.changes, plan.window))
    return 2 * plan.target_length if is_beyond_window else plan.trained_length


def write(model: nn.Module, sites: list[Site], plan: Plan, earlier: PatchRecord | None) -> None:
    """Writes sites, softmax scaling, length fields, `rope_parameters` and the record."""
    root = mechanisms.root_model(model)
    undo = root.__dict__.setdefault(STATE, PatchState()).configs
    before = earlier.before if earlier else fields_before(root)
    first = earlier.original_max_position_embeddings if earlier else original_length(root.config, plan.trained_length)
    tables = [site for site in mechanisms.find_sites(model) if mechanisms.has_rows(site)]
    if all(str(site) in plan.names for site in tables):  # else the field is the size of a table that stays
        length = plan.config_length if tables else plan.target_length
        for config in config_parts(model):
            undo.set(config, **dict.fromkeys(length_fields(config), length))
    if not plan.is_active:
        native_kind = "unchanged"
    elif plan.dynamic:
        native_kind = None
        dynamics.install(model, plan, sites)
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
        native=native_kind,
        note="" if native_kind else NOTE.format(method=plan.method.name),
        before=before,
        previous=[{**step.to_dict(), "previous": []} for step in earlier.steps()] if earlier else [],
        version=version("hf_posext"),
    )
    undo.set(root.config, **{CONFIG_FIELD: record.to_dict()})


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


def replay(model: nn.Module, record: PatchRecord, tokenizers: Iterable[tuple[Any, Any]] = ()) -> None:
    """Patches an unpatched model as a record says, step by step; `tokenizers` are those that unpatching gives back."""
    for step in record.steps():
        how = step.layers, step.options, step.dynamic, step.scale
        apply(model, make_plan(model, step.method, step.factor, None, step.trained_length, *how))
    state_of(model).tokenizers = list(tokenizers)


def ensure_adopted(model: nn.Module) -> None:
    """Takes over a model that plain transformers loaded from a patched checkpoint, so that it can be unpatched.

    Its config has a record but its modules have nothing to go back to: they are first made what they were before the
    patch, by their own class from the recorded config fields, and then patched again. Nothing is applied twice.

    Raises:
        PatchError: the frequencies that were loaded are not those of the record.
    """
    root = mechanisms.root_model(model)
    record = record_of(model)
    if record is None or STATE in root.__dict__:
        return
    own_configs(model)
    found = mechanisms.find_sites(model)  # before the config is set, since a table is known by its length
    loaded = {str(site): mechanisms.read(site, record.target_length) for site in found}
    longer = stated_length(root.config)
    set_fields(model, record.before)
    delattr(root.config, CONFIG_FIELD)
    more = longer - stated_length(root.config)
    for site in found:
        mechanisms.reset(model, site, more if str(site) in record.sites else 0)
    replay(model, record)
    if record.native is None:
        return
    for site in mechanisms.find_sites(model):
        present, before = mechanisms.read(site, record.target_length), loaded[str(site)]
        if not (isinstance(present, Spectrum) and isinstance(before, Spectrum)):
            continue
        now, then = present.inv_freq, before.inv_freq
        if not torch.allclose(now, then, rtol=1e-5, atol=0):
            raise PatchError(
                f"{site} was loaded with frequencies that its patch record ({record.describe()}) does not give. The "
                "config was edited after it was saved; load the original checkpoint and patch it again."
            )


def state_of(model: nn.Module) -> PatchState:
    """The state of a patched model."""
    return mechanisms.root_model(model).__dict__[STATE]
