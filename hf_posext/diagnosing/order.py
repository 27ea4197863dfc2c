"""Is position in effect: shuffled input layer by layer, and other position ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_posext import mechanisms
from hf_posext.contract import Site
from hf_posext.diagnosing.finding import NOTE, OK, WRONG, Finding, NotApplicableError
from hf_posext.diagnosing.subject import TOKENS, Subject, apart

IN_ATTENTION = ("rotary", "alibi", "relative_bias")
BY_DISTANCE = ("alibi", "relative_bias")  # biases that the host makes of the mask or of slots
WINDOWS = ("sliding_window", "window_size", "local_attention", "attention_window", "local_radius")


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
    ids, shuffle = subject.text(min(TOKENS, subject.short_length)), shuffled(subject)
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
        return Finding(
            "order",
            NOTE,
            measured,
            f"{len(deaf)} of {len(measured['layer_input_shuffled'])} layers read no position of their own that shows "
            "above rounding.",
            "Expected where the architecture has layers without position; in 16 bits, load in float32 to be sure.",
        )
    return Finding("order", OK, measured, "The order of tokens matters.")


def stack_of(subject: Subject) -> nn.ModuleList:
    """The layers of the sub-model that is served last: the decoder where there are two.

    Raises:
        NotApplicableError: none are found.
    """
    layers = max(outermost_lists(subject.owners()[-1]), key=len, default=None)
    if not layers:
        raise NotApplicableError("The model has no stack of layers.")
    return layers


def outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    """The lists of a model that are in no other list: not those of the parts of a layer."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from outermost_lists(child)


def shuffled(subject: Subject) -> Tensor:
    """[L], places of a text whose last token stays and whose tokens before it, within every window, are reversed."""
    length = min(TOKENS, subject.short_length)
    reach = min([length, *windows(subject)])
    if reach < 4:
        raise NotApplicableError("Layers see too few tokens for their order to be changed.")
    places = list(range(length))
    return torch.tensor([*places[: length - reach], *reversed(places[length - reach : -1]), length - 1])


def windows(subject: Subject) -> list[int]:
    """Half of each sliding window that the configs of the sites name: what a token is sure to see before it."""
    found = [getattr(site.config, name, None) for site in subject.sites for name in WINDOWS]
    return [value // 2 for value in found if isinstance(value, int) and value > 0]


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


def read_at(subject: Subject, ids: Tensor, places: Tensor) -> Tensor:
    """[1, L, V], what the model says to a text whose tokens stand at given places.

    One more token is masked: a mask of ones is dropped by some models, and places with gaps would then look like
    packed documents.
    """
    mask = torch.ones_like(ids)
    inputs = {"attention_mask": (mask, 0 * mask[:, :1]), "position_ids": (places, places[:, -1:])}
    joined = {name: torch.cat(parts, dim=1) for name, parts in inputs.items()}
    return subject.read(torch.cat((ids, ids[:, :1]), dim=1), **joined)[:, :-1]


def is_by_distance(site: Site) -> bool:
    """Whether a site reads no `position_ids`: it is off, or makes a bias of the mask or of slots."""
    return mechanisms.is_off(site) or site.mechanism in BY_DISTANCE


def position_ids(subject: Subject) -> Finding:
    """Whether the position ids that the model is given change what it says.

    Raises:
        NotApplicableError: it takes none, is too short to spread them, or says nothing about positions.
    """
    if "position_ids" not in subject.accepted:
        raise NotApplicableError("The model takes no `position_ids`.")
    if all(map(is_by_distance, subject.sites)):
        raise NotApplicableError("Nothing in the model that is switched on would read `position_ids`.")
    ids = subject.text(min(8, subject.short_length // 2))
    places = torch.arange(ids.shape[1], device=ids.device)[None]
    step = max(2, (subject.short_length - 1) // ids.shape[1])
    near, far = (read_at(subject, ids, each) for each in (places, step * places))
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
