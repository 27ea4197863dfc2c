"""gate_adapter: patch and adapter off together, so that text of at most N tokens is read as by the original model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from hf_posext import gates, probe
from hf_posext.attention.reading import OWNER
from hf_posext.attention.scaling import Dynamics, turnings
from hf_posext.errors import PatchError, quoted
from hf_posext.freezing import following
from hf_posext.gates import Gate, Gated
from hf_posext.mechanisms import root_model
from hf_posext.mechanisms._scope import scoped_modules
from hf_posext.methods import get_method
from hf_posext.patching import ensure_adopted
from hf_posext.records import GATED, PatchRecord, is_gated, record_of
from hf_posext.tables import RowChoice

__all__ = ["gate_adapter", "is_gated", "ungate_adapter"]

LEAVES_BASE = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of `init_lora_weights` that leave the weights of the base model as they are."""
MIXES = {"attention_mask", "attn_mask"}
"""What a module is told whose tokens read each other."""
ModelT = TypeVar("ModelT", bound=nn.Module)


def gate_adapter(model: ModelT) -> ModelT:
    """Makes an adapter act only where the dynamic patch of its model does: on text beyond N tokens.

    Causal models compute each token by its own length (its position + 1, padding left out), so that decoding with a
    cache equals one pass; encoders, and models with a table of positions, compute each row by the row's length. A row
    of at most N tokens is read as by the original model, without patch and adapter, to the last bit; beside a long row
    it is, to the last bit, what the patch alone gives, which may round attention by what is beside a row. Where the
    patch is taken off (`unpatch_model`, `suspended`, the bars of an evaluation) the adapter is off at every length,
    also under another patch that does not follow the length.

    Args:
        model: a model patched with `dynamic=True` that has an adapter of PEFT (layers of any kind, modules and tokens
            trained whole), wrapped before or after the patch. Call it again after another adapter was added.

    Returns:
        The same model.

    Raises:
        TypeError: there is no transformers model.
        PatchError: there is no such patch or no such adapter, or short text cannot be read as by the original model.
    """
    root = root_model(model)
    ensure_adopted(model)
    record = dynamic_record(model)
    layers = adapted_layers(model)
    check_adapter(model, layers)
    found = find_gates(model, record)
    gated = gated_layers(model, layers, found)
    was_gated = is_gated(model)
    gates.detach(model)
    attach(root, found, gated)
    try:
        prove(model, record.trained_length)
    except BaseException:
        if not was_gated:
            gates.detach(model)
        raise
    return model


def ungate_adapter(model: ModelT) -> ModelT:
    """Makes a gated adapter act on text of any length again.

    Returns:
        The same model; one that is not gated is returned as it is.
    """
    gates.detach(model)
    return model


def dynamic_record(model: nn.Module) -> PatchRecord:
    """The record of a patch that leaves text of at most N tokens as it is.

    Raises:
        PatchError: the model has none.
    """
    record = record_of(model)
    if record is None:
        raise PatchError("The model is not patched. Call `patch_model` with dynamic=True, then gate its adapter.")
    if not record.dynamic:
        raise PatchError(
            f"{record.describe()} changes text of any length: a patch leaves text within N tokens as it is only with "
            "dynamic=True. Patch with it, then gate the adapter."
        )
    if record.previous or not all(keeps_short(record, each) for each in following(model)):
        raise PatchError(
            f"{record.describe()} does not leave text within {record.trained_length} tokens as it is (by a list for "
            "short text, or a patch below it), so there is nothing that a gate could keep. Patch with another method."
        )
    return record


def keeps_short(record: PatchRecord, reader: Dynamics) -> bool:
    """Whether a method says nothing of its own for text within N tokens."""
    method, options = get_method(record.method), record.options
    if not method.follows_length(options):
        return True
    spectra = [replace(each.spectrum, inv_freq=each.spectrum.inv_freq.cpu()) for each in reader.schedules.values()]
    return all(
        method.change("rotary", spectrum, 1.0, record.factor, options).is_identity(spectrum) for spectrum in spectra
    )


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """The layers of PEFT: path in the outermost transformers model -> the innermost one that an adapter can be off in.

    Raises:
        PatchError: there are none.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    configs = getattr(model, "peft_config", None) or {}
    if any(config.is_prompt_learning or config.is_adaption_prompt for config in configs.values()):
        raise PatchError(
            "An adapter that puts virtual tokens in front of the text cannot be gated, since no token of a long text "
            "is without it. Gate an adapter of weights (LoRA)."
        )
    named = root_model(model).named_modules()
    found = {name: module for name, module in named if isinstance(module, BaseTunerLayer | ModulesToSaveWrapper)}
    if not found:
        raise PatchError("The model has no PEFT adapter. Give it one with `peft.get_peft_model`, then gate it.")
    return found


def check_adapter(model: nn.Module, layers: dict[str, Any]) -> None:
    """Refuses an adapter without which the model is not the original one, or that does not act token by token.

    Raises:
        PatchError: with the setting or the layer.
    """
    merged = [name for name, layer in layers.items() if getattr(layer, "merged", False)]
    if merged:
        raise PatchError(f"The adapter is merged into {quoted(merged[:1])}. Call `unmerge_adapter`, then gate it.")
    for config in (getattr(root_model(model), "peft_config", None) or {}).values():
        settings = {"bias": getattr(config, "bias", "none"), "init": getattr(config, "init_lora_weights", True)}
        if settings["bias"] != "none" or settings["init"] not in LEAVES_BASE:
            raise PatchError(
                f"An adapter with bias={settings['bias']!r} and init_lora_weights={settings['init']!r} changes weights "
                "of the base model itself, so that it cannot be off for short text. Train one that leaves them as they "
                "are (bias='none', init_lora_weights=True)."
            )
    for name, layer in layers.items():
        module = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer.original_module
        if MIXES & inspect.signature(module.forward).parameters.keys():
            raise PatchError(
                f"The adapter holds the whole of `{name}`, which mixes tokens, so it cannot be off for some of them. "
                "Adapt the layers inside it instead."
            )


def find_gates(model: nn.Module, record: PatchRecord) -> dict[nn.Module, Gate]:
    """A gate for each sub-model whose text a dynamic patch reads.

    Raises:
        PatchError: nothing follows the length, or a decoder goes by tokens while it reads those of an encoder too.
    """
    readers = {module: module.__dict__[OWNER] for module in model.modules() if OWNER in module.__dict__}
    by_row = {
        owner: isinstance(reader, RowChoice) or not all(turning.is_causal for turning in turnings(owner))
        for owner, reader in readers.items()
        if isinstance(reader, Dynamics)
    }
    if not by_row:
        raise PatchError(
            f"{record.describe()} changes nothing, so an adapter would never act. Patch with a factor > 1."
        )
    if root_model(model).config.is_encoder_decoder and not all(by_row.values()):
        raise PatchError(
            f"The adapter of {type(root_model(model)).__name__} cannot be gated: the patch goes by the tokens of its "
            "decoder, whose layers also read those of an encoder. Use the adapter without a gate."
        )
    return {owner: Gate(owner, record.trained_length, is_by_row) for owner, is_by_row in by_row.items()}


def gated_layers(
    model: nn.Module, layers: dict[str, Any], found: dict[nn.Module, Gate]
) -> list[tuple[nn.Module, Gated]]:
    """Each layer with the text that it reads: of the innermost sub-model around it, or for a head of the decoder.

    Raises:
        PatchError: a layer that reads no text, or it is not known which.
    """
    around = {module: gate for owner, gate in found.items() for module in owner.modules()}
    read = following(model)
    heads = [gate for owner, gate in found.items() if any(owner.__dict__[OWNER] is each for each in read)]
    is_text = {each.module: each.is_text for each in scoped_modules(model)}
    placed: list[tuple[nn.Module, Gated]] = []
    for name, layer in layers.items():
        if layer not in around and (len(heads) != 1 or not is_text[layer]):
            raise PatchError(
                f"The adapter acts in `{name}`, which does not read the text whose length is counted. Leave it out "
                "(`target_modules` or `exclude_modules` of its config), or use the adapter without a gate."
            )
        gate = around.get(layer) or heads[0]
        gate.has_head = gate.has_head or layer not in around
        placed.append((layer, Gated(gate, is_head=layer not in around)))
    return placed


def attach(root: nn.Module, found: dict[nn.Module, Gate], layers: list[tuple[nn.Module, Gated]]) -> None:
    """Puts gates into a model, and what tells them of each forward."""
    from peft.tuners import lora

    for owner, gate in found.items():
        owner.__dict__[gates.GATE] = gate
        owner.register_forward_pre_hook(gates.before_text, with_kwargs=True)
        owner.register_forward_hook(gates.after_text, prepend=True, always_call=True)
    root.__dict__[gates.GATES] = list(found.values())
    root.register_forward_pre_hook(gates.before_model, with_kwargs=True)
    root.register_forward_hook(gates.after_model, always_call=True)
    for layer, gated in layers:
        layer.__dict__[GATED] = gated
        layer.register_forward_pre_hook(gates.before_layer)
        layer.register_forward_hook(gates.after_layer, with_kwargs=True, always_call=True)
        whole = lora.layer.ParamWrapper, lora.layer.MultiheadAttention  # these run their module with other weights
        if isinstance(layer, lora.LoraLayer) and not isinstance(layer, whole):
            layer.base_layer.__dict__[gates.LAYER] = layer
            layer.base_layer.register_forward_hook(gates.after_base)


def prove(model: nn.Module, trained_length: int) -> None:
    """Demands that a few tokens within N are read as with every adapter switched off, where the model runs on ids.

    Raises:
        PatchError: something of an adapter acts outside of its layers.
    """
    found = probe.run(model, [], probe.DEPTHS[-1], trained_length)
    with switched_off(model):
        expected = probe.run(model, [], probe.DEPTHS[-1], trained_length)
    if found is not None and (expected is None or not torch.equal(found, expected)):
        raise PatchError(
            f"The adapter of {type(root_model(model)).__name__} acts on short text though it is gated: some of its "
            "weights are used outside of its layers. Leave them out of the adapter, or use it without a gate."
        )


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """All adapters off for the length of a block; what is trained stays trainable, unlike with PEFT's own switch."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    kinds = BaseTunerLayer | AuxiliaryTrainingWrapper
    layers: list[Any] = [module for module in model.modules() if isinstance(module, kinds)]
    before = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, was_off in zip(layers, before, strict=True):
            layer._disable_adapters = was_off
