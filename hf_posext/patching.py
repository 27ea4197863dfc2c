"""patch_model, unpatch_model, patched, suspended: what users call."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from hf_posext import mechanisms, recovery
from hf_posext.applying import Trained, apply, replay, trained_by
from hf_posext.arguments import check_flag
from hf_posext.attention import reading
from hf_posext.configs import own_configs, set_fields
from hf_posext.contract import Spectrum
from hf_posext.errors import PatchError
from hf_posext.planning import make_plan
from hf_posext.records import CONFIG_FIELD, PatchRecord, record_of
from hf_posext.writing import STATE, remove, state_of

logger = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)


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
        model: a transformers model, also inside PEFT or another wrapper. One that only sees (ViT, DINOv2, the tower of
            CLIP by itself) is patched for larger images: N and T are pixels per side of square ones.
        method: name or alias of a method, see `list_methods`.
        factor: s = T / N, a finite number >= 1, relative to the model as given; 1 changes no bit of any output.
        target_length: T in tokens, in place of `factor`.
        original_max_position_embeddings: N in tokens, where the config does not say it or says it wrong.
        dynamic: the factor follows the length l, s = max(1, l / N) in 8 to 32 steps per doubling up to `factor`: l of
            each token in causal models (its position + 1, padding left out), of each row in encoders. Text of at most
            N tokens is read as by the unpatched model, to the last bit, and decoding with a cache equals one full pass.
            Tables of rows have one longer table for whatever is beyond N, chosen for each row of a batch.
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
    if earlier is not None and is_final(model, earlier):
        reason = "its factor follows the length" if earlier.dynamic else "it is more than other frequencies"
        raise PatchError(f"Nothing can be put on top of {earlier.describe()}: {reason}. Unpatch first.")
    apply(model, plan)
    if plan.is_active and plan.method.needs_tuning and not plan.keeps_short:
        logger.info("A model that was trained with another encoding needs tuning after `%s`.", plan.method.name)
    if tokenizer is not None:
        state_of(model).tokenizers.append((tokenizer, tokenizer.model_max_length))
        tokenizer.model_max_length = plan.target_length
    return model


def is_final(model: nn.Module, record: PatchRecord) -> bool:
    """Whether nothing can be put on top of a patch."""
    return record.dynamic or bool(reading.adapters(model)) or any(map(mechanisms.is_off, mechanisms.find_sites(model)))


def unpatch_model(model: Model) -> Model:
    """Takes all patches off: logits, config, classes, buffers and state-dict keys are as before, bit for bit.

    What was trained of a patch (new rows of a table, slopes, biases) goes with it: save the model first.

    Returns:
        The same model; one that is not patched is returned as it is.
    """
    ensure_adopted(model)
    if record_of(model) is not None:
        check_not_lost(model)
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
    tokenizers, trained = state_of(model).tokenizers, trained_by(model)
    check_not_lost(model)
    remove(model)
    try:
        yield model
    finally:
        replay(model, record, tokenizers, trained)


def check_not_lost(model: nn.Module) -> None:
    """Refuses to take a patch off whose original is not known.

    Raises:
        PatchError: with the table.
    """
    lost = recovery.lost_tables(model)
    if lost:
        raise PatchError(
            f"The rows that {lost[0]} had before the patch are not in the checkpoint that was loaded, so that it "
            "cannot be taken off. Load the original checkpoint."
        )


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
    rows, lost = recovery.reset(model, record, [site for site in found if mechanisms.is_table(site)])
    set_fields(model, record.before)
    delattr(root.config, CONFIG_FIELD)
    for site in found:
        if not mechanisms.is_table(site):
            mechanisms.reset(model, site)
    replay(model, record, trained=Trained(rows, lost=lost))
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
