"""Position switched off: what a model says then, and its loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hf_posext import mechanisms
from hf_posext.attention.interface import ADAPTER
from hf_posext.configs import own_configs
from hf_posext.diagnosing.finding import OK, WRONG, Finding, NotApplicableError
from hf_posext.diagnosing.order import is_by_distance, read_at
from hf_posext.diagnosing.subject import ROOM, Subject, apart
from hf_posext.errors import PatchError
from hf_posext.patching import patched
from hf_posext.probe import NoEffectError

EVERYWHERE_ZERO = 1e6  # divides every distance that a text has down to 0
PASSAGE = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness was "
    "upon the face of the deep. And the Spirit of God moved upon the face of the waters."
)


def ablation(subject: Subject) -> Finding:
    """Whether switching position off changes what the model says, and its loss.

    An unpatched model is patched by `nope` and back. A patched one keeps its patch: it reads all tokens at position 0,
    or without what the patch does in attention.

    Raises:
        NotApplicableError: position cannot be switched off in this model.
    """
    if subject.in_force and subject.record is not None and subject.record.method == "nope":
        raise NotApplicableError("Position is switched off already.")
    ids = passage(subject)
    present, absent = on_and_off(subject, ids) if subject.record is None else on_and_at_0(subject, ids)
    change = apart(present, absent)
    measured = {"change_of_output": change, **losses(subject, ids, present, absent)}
    if change < subject.noise:
        return Finding(
            "ablation",
            WRONG,
            measured,
            "Switching position off changes nothing of what the model says.",
            "Load without fused or replaced attention; see what `order` and `rotation` say.",
        )
    return Finding("ablation", OK, measured, "Switching position off changes what the model says.")


def on_and_off(subject: Subject, ids: Tensor) -> tuple[Tensor, Tensor]:
    """What an unpatched model says to a text with position and without it, [1, L, V] each.

    Raises:
        NotApplicableError: position cannot be switched off in this model.
    """
    present = subject.read(ids)
    try:
        with without_position(subject):
            return present, subject.read(ids)
    except NoEffectError:
        return present, present
    except (PatchError, ValueError) as error:
        raise NotApplicableError(f"Position cannot be switched off in this model ({error}).") from error


def on_and_at_0(subject: Subject, ids: Tensor) -> tuple[Tensor, Tensor]:
    """What a patched model says to a text where its tokens stand, and with all of them at position 0, [1, L, V] each.

    Where the patch itself has switched the model's own encoding off, all that is left of position is in its adapters.

    Raises:
        NotApplicableError: it does not take its positions from outside.
    """
    if subject.acts_in_attention and all(map(mechanisms.is_off, subject.sites)):
        present = subject.read(ids)
        with without_adapters(subject.root):
            return present, subject.read(ids)
    if "position_ids" not in subject.accepted or all(map(is_by_distance, subject.sites)):
        raise NotApplicableError("The patch would have to be taken off, since no `position_ids` reach it.")
    places = torch.arange(ids.shape[1], device=ids.device)[None]
    return read_at(subject, ids, places), read_at(subject, ids, torch.zeros_like(places))


@contextmanager
def without_adapters(root: nn.Module) -> Iterator[None]:
    """Attention as the model's own for the length of a block."""
    kept = [(module, vars(module).pop(ADAPTER)) for module in root.modules() if ADAPTER in vars(module)]
    try:
        yield
    finally:
        for module, adapter in kept:
            vars(module)[ADAPTER] = adapter


def passage(subject: Subject) -> Tensor:
    """[1, L] a few sentences if there is a tokenizer, else tokens said twice, which only position tells apart."""
    most = min(64, subject.short_length)
    if callable(subject.tokenizer):
        return torch.tensor([subject.tokenizer(PASSAGE)["input_ids"][:most]], device=subject.text().device)
    once = subject.text(most // 2)
    return torch.cat((once, once), dim=1)


@contextmanager
def without_position(subject: Subject) -> Iterator[None]:
    """An unpatched model without position for the length of a block; its configs are the same objects afterwards."""
    kinds = {site.mechanism for site in subject.sites}
    method, factor = ("pi", EVERYWHERE_ZERO) if kinds == {"relative_bias"} else ("nope", 2.0)
    length = subject.trained_length or ROOM
    configs = own_configs(subject.model)
    try:
        with patched(subject.model, method, factor, original_max_position_embeddings=length):
            yield
    finally:
        configs.give_back()


def losses(subject: Subject, ids: Tensor, present: Tensor, absent: Tensor) -> dict[str, float]:
    """NLL per token with and without position in nats; empty where the outputs are no logits over the next token."""
    is_head = subject.root.get_output_embeddings() is not None and not subject.root.config.is_encoder_decoder
    if not is_head or not is_causal(subject):
        return {}
    targets = ids[0, 1:].cpu()
    nll = [nn.functional.cross_entropy(each[0, :-1], targets) for each in (present, absent)]
    return {"nll": float(nll[0]), "nll_without_position": float(nll[1])}


def is_causal(subject: Subject) -> bool:
    """Whether a token does not depend on those after it."""
    ids = subject.text()
    other = ids.clone()
    other[0, -1] = ids[0, 0]
    return apart(subject.read(ids)[0, 0], subject.read(other)[0, 0]) < subject.noise
