"""Is position in effect: shuffled input layer by layer, switched off, other position ids, and how attention rotates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posext import mechanisms
from hf_posext.configs import own_configs
from hf_posext.diagnosing.finding import NOTE, OK, WRONG, Finding, NotApplicableError
from hf_posext.diagnosing.subject import TOKENS, Subject, apart, noise_of
from hf_posext.errors import NoSiteError, PatchError
from hf_posext.inspection import window_of
from hf_posext.patching import patched, suspended
from hf_posext.probe import NoEffectError
from hf_posext.writing import STATE

IN_ATTENTION = ("rotary", "alibi", "relative_bias")
EVERYWHERE_ZERO = 1e6  # divides every distance that a text has down to 0
PASSAGE = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness was "
    "upon the face of the deep. And the Spirit of God moved upon the face of the waters."
)


@dataclass
class Layers:
    """Notes what each layer gives for the last token, and what it would give if its input were shuffled before it.

    Attributes:
        last: each layer's answer for the last token.
        moved: how far shuffling the input of that layer alone moves it, over what the layer adds.
    """

    shuffle: Tensor
    last: list[Tensor] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)

    def note(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """A forward hook of a layer."""
        states = args[0] if args else kwargs["hidden_states"]
        axis = list(states.shape).index(len(self.shuffle))
        shuffled = states.index_select(axis, self.shuffle.to(states.device))
        inputs = ((shuffled, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": shuffled})
        here, other = (last_row(each, axis) for each in (output, layer.forward(*inputs[0], **inputs[1])))
        self.last.append(here)
        added = (here - last_row(states, axis)).norm().clamp(min=1e-30)
        self.moved.append(float((here - other).norm() / added))


def last_row(output: Any, axis: int) -> Tensor:
    """[W] or [B, W] float32, what a layer gives for the last token."""
    states = output[0] if isinstance(output, tuple) else output
    return states.select(axis, -1).detach().float().cpu()


def order(subject: Subject) -> Finding:
    """Whether the order of the tokens before it matters to the last token, layer by layer.

    The first layer, and every layer by itself, tell tokens apart by their content alone where position is not in
    effect. Deeper ones of a causal model do not: what they are given depends on which tokens came first.

    Raises:
        NotApplicableError: no encoding is known, or no stack of layers is found.
    """
    if not subject.sites:
        raise NotApplicableError("No position encoding that is known was found.")
    stack = stack_of(subject)
    ids, shuffle = subject.text(min(TOKENS, subject.target)), shuffled(subject)
    first, second = watched(subject, stack, ids, shuffle), watched(subject, stack, ids[:, shuffle], shuffle)
    noise, whole = subject.noise, apart(first.last[0], second.last[0])
    deaf = [index for index, moved in enumerate(first.moved) if moved < noise]
    measured = {"input_shuffled": whole, "layer_input_shuffled": first.moved, "layers_without": deaf}
    return order_finding(subject, measured, whole > noise or len(deaf) < len(first.moved), deaf)


def order_finding(subject: Subject, measured: dict[str, Any], in_effect: bool, deaf: list[int]) -> Finding:
    """What the order test means."""
    if not in_effect and subject.in_force and subject.record is not None and subject.record.method == "nope":
        meaning = "The order of tokens has no effect, as the patch `nope` says."
        return Finding("order", NOTE, measured, meaning, "Call `unpatch_model` where that is not wanted.")
    if not in_effect:
        return Finding(
            "order",
            WRONG,
            measured,
            "Shuffling the text before a token changes nothing in any layer: position is not in effect.",
            "Load without fused or replaced attention, and look at what `ablation`, `rotation` and `magnitudes` say.",
        )
    relative = [site for site in subject.sites if site.mechanism in IN_ATTENTION and not mechanisms.is_off(site)]
    if deaf and relative:
        meaning = f"{len(deaf)} of {len(measured['layer_input_shuffled'])} layers read no position of their own."
        return Finding("order", NOTE, measured, meaning, "Expected where the architecture has layers without position.")
    return Finding("order", OK, measured, "The order of tokens matters.")


def stack_of(subject: Subject) -> nn.ModuleList:
    """The layers of the sub-model that is served last: the decoder where there are two.

    Raises:
        NotApplicableError: none are found.
    """
    owner = subject.owners()[-1]
    stacks = [module for module in owner.modules() if isinstance(module, nn.ModuleList)]
    layers = max(stacks, key=len, default=None)
    if not layers:
        raise NotApplicableError("The model has no stack of layers.")
    return layers


def shuffled(subject: Subject) -> Tensor:
    """[L], places of a text whose last token stays and whose tokens before it, within every window, are reversed."""
    length = min(TOKENS, subject.target)
    windows = [window_of(site) for site in subject.sites]
    reach = min([length, *(window for window in windows if window), *shared_windows(subject)])
    if reach < 4:
        raise NotApplicableError("Layers see too few tokens for their order to be changed.")
    places = list(range(length))
    return torch.tensor([*places[: length - reach], *reversed(places[length - reach : -1]), length - 1])


def shared_windows(subject: Subject) -> list[int]:
    """Sliding windows that the configs of the sites name, also of layers that share a table with full ones."""
    names = ("sliding_window", "window_size", "local_attention", "attention_window")
    found = [getattr(site.config, name, None) for site in subject.sites for name in names]
    local = [value // 2 for value in found if isinstance(value, int) and value > 0]
    return [max(value, 1) for value in local]


def watched(subject: Subject, stack: nn.ModuleList, ids: Tensor, shuffle: Tensor) -> Layers:
    """What the layers say to a text.

    Raises:
        NotApplicableError: they do not run in the forward of the model.
    """
    seen = Layers(shuffle)
    handles = [layer.register_forward_hook(seen.note, with_kwargs=True) for layer in stack]
    try:
        subject.run(ids)
    finally:
        for handle in handles:
            handle.remove()
    if not seen.last:
        raise NotApplicableError("The layers of the model do not run in its forward.")
    return seen


def ablation(subject: Subject) -> Finding:
    """Whether switching position off changes what the model says, and its loss.

    Raises:
        NotApplicableError: position cannot be switched off in this model.
    """
    if subject.record is not None and STATE not in vars(subject.root):
        raise NotApplicableError("The patch was loaded by plain transformers, and nothing says how to take it off.")
    if subject.in_force and subject.record is not None and subject.record.method == "nope":
        raise NotApplicableError("Position is switched off already.")
    ids = passage(subject)
    present = subject.read(ids)
    try:
        with without_position(subject):
            absent = subject.read(ids)
    except NoEffectError:
        absent = present
    except (NoSiteError, PatchError, ValueError) as error:
        raise NotApplicableError(f"Position cannot be switched off in this model ({error}).") from error
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


def passage(subject: Subject) -> Tensor:
    """[1, L] a few sentences if there is a tokenizer, else tokens said twice, which only position tells apart."""
    most = min(64, subject.short_length)
    if callable(subject.tokenizer):
        return torch.tensor([subject.tokenizer(PASSAGE)["input_ids"][:most]], device=subject.text().device)
    once = subject.text(most // 2)
    return torch.cat((once, once), dim=1)


@contextmanager
def without_position(subject: Subject) -> Iterator[None]:
    """The model without position for the length of a block; its config objects are its own again afterwards."""
    model, length = subject.model, subject.target
    with suspended(model):
        configs = own_configs(model) if subject.record is None else None
        kinds = {site.mechanism for site in mechanisms.find_sites(model)}
        method, factor = ("pi", EVERYWHERE_ZERO) if kinds == {"relative_bias"} else ("nope", 2.0)
        given = {"original_max_position_embeddings": length} if kinds == {"relative_bias"} else {}
        try:
            with patched(model, method, factor, **given):
                yield
        finally:
            if configs is not None:
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


def position_ids(subject: Subject) -> Finding:
    """Whether the position ids that the model is given change what it says.

    Raises:
        NotApplicableError: it takes none, is too short to spread them, or says nothing about positions.
    """
    if "position_ids" not in subject.accepted:
        raise NotApplicableError("The model takes no `position_ids`.")
    if not subject.sites or all(map(mechanisms.is_off, subject.sites)):
        raise NotApplicableError("No module of the model that is switched on would read them.")
    ids = subject.text(min(8, subject.short_length // 2))
    places = torch.arange(ids.shape[1], device=ids.device)[None]
    mask = torch.ones_like(ids)
    mask[:, -1] = 0  # a mask of ones is dropped by some models, and gaps would then look like packed documents
    step = max(2, (subject.short_length - 1) // ids.shape[1])
    near, far = (
        subject.read(ids, attention_mask=mask, position_ids=each)[:, :-1] for each in (places, step * places)
    )
    change = apart(near, far)
    if change < subject.noise:
        return Finding(
            "position_ids",
            WRONG,
            {"change_of_output": change},
            "The model says the same whatever `position_ids` it is given.",
            "Packing and left padding need them: look for a forward that drops them, or for position out of effect.",
        )
    return Finding("position_ids", OK, {"change_of_output": change}, "The model reads the `position_ids` given to it.")


def owner_of(subject: Subject) -> PreTrainedModel:
    """The sub-model whose layers are watched."""
    return subject.owners()[-1]


__all__ = ["ablation", "noise_of", "order", "owner_of", "position_ids"]
