"""Gates of adapters: hooks by which layers of PEFT act on the tokens of a forward that are beyond N, and no others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_posext.attention.reading import OWNER, Reader
from hf_posext.attention.scaling import Dynamics
from hf_posext.beyond import Beyond, check_rows, places
from hf_posext.errors import PatchError
from hf_posext.records import GATED
from hf_posext.tables import RowChoice

GATE = "_posext_gate"
GATES = "_posext_gates"
LAYER = "_posext_gated_layer"
KEPT = (GATE, GATES, GATED, LAYER)
"""Names in the `__dict__` of modules: owners, the outermost model, layers of PEFT, and their original modules."""
RERUN = "_gradient_checkpointing_func"  # what transformers calls to run a layer, and to run it again in backward


@dataclass
class Gate:
    """What the adapted layers of a model ask about the text that one sub-model reads, the `owner` of its reader.

    Attributes:
        owner: the sub-model.
        trained_length: N in tokens.
        by_row: whether the patch goes by the length of each row, not by that of each token.
        has_head: whether there are adapted layers behind the sub-model.
        states: [B, L, ...], ids or embeddings of the present forward.
        kept: as in `Beyond.fitted`.
        now: what is beyond N in the present forward; None before it is asked for.
        layers: those whose checkpointing has been told of the present forward.
    """

    owner: nn.Module
    trained_length: int
    by_row: bool
    has_head: bool = False
    states: Tensor | None = None
    kept: Any = 0
    now: Beyond | None = None
    layers: list[nn.Module] = field(default_factory=list)

    def present(self) -> Beyond | None:
        """What is beyond N in the forward that runs; None where no dynamic patch is in force, so that nothing is.

        Raises:
            PatchError: none runs.
        """
        reader = self.owner.__dict__.get(OWNER)
        if self.now is None and isinstance(reader, Dynamics):
            self.now = self.read(reader)
        return self.now

    def read(self, reader: Dynamics) -> Beyond:
        """What is beyond N by what the patch reads, so that the adapter is on where the patch is.

        Raises:
            PatchError: no forward of the sub-model runs.
        """
        forward, states = reader.forward, self.states
        if forward is None or states is None:
            raise PatchError(
                "A layer with a gated adapter ran before the text of its model was read. Call the model, not its "
                "layers, and leave layers that read no text out of the adapter (`exclude_modules`)."
            )
        if isinstance(reader, RowChoice):
            looked_up = reader.is_long  # what the table itself has chosen, or will choose, is what a cache notes
            rows, reader.is_long = reader.chooses(places(reader, forward, states)), looked_up
        else:
            lengths = forward.now.row_lengths() if self.by_row else forward.now.token_lengths()
            rows = lengths > self.trained_length
        mask = (rows[:, None] if self.by_row else rows).expand(states.shape[:2])
        if torch.compiler.is_compiling():
            return Beyond(mask, self.by_row)
        some, every = torch.stack((mask.any(), mask.all())).tolist()
        return Beyond(mask, self.by_row, not some, every)

    def run(self, beyond: Beyond | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function as in the forward in which this was beyond N."""
        before, self.now = self.now, beyond
        try:
            return function(*args, **kwargs)
        finally:
            self.now = before


@dataclass(frozen=True)
class Rerun:
    """Runs a layer by gradient checkpointing, so that in backward too it sees the text of its own forward."""

    gate: Gate
    inner: Callable[..., Any]

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As the function that transformers has put there."""
        return self.inner(partial(self.gate.run, self.gate.present(), function), *args, **kwargs)


def before_text(owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A new text begins; a pre-hook of the owner of a reader."""
    gate: Gate = owner.__dict__[GATE]
    reader: Reader | None = owner.__dict__.get(OWNER)
    gate.now = gate.states = None
    if reader is not None:
        gate.states = reader.argument(args, kwargs, "input_ids", "decoder_input_ids", "inputs_embeds")
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        gate.layers = [module for module in owner.modules() if RERUN in vars(module)]
        for module in gate.layers:
            vars(module)[RERUN] = Rerun(gate, vars(module)[RERUN])


def after_text(owner: nn.Module, args: Any, output: Any) -> None:
    """A text was read; a hook of the owner that runs before its reader forgets it."""
    gate: Gate = owner.__dict__[GATE]
    for module in gate.layers:
        vars(module)[RERUN] = vars(module)[RERUN].inner
    gate.layers = []
    if output is None:
        return
    if gate.has_head:
        gate.present()
    reader, beyond = owner.__dict__.get(OWNER), gate.now
    if isinstance(reader, RowChoice) and beyond is not None and not torch.compiler.is_compiling():
        check_rows(beyond, reader.is_long)


def before_model(root: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Notes which tokens the head is asked for; a pre-hook of the outermost transformers model."""
    for gate in root.__dict__[GATES]:
        gate.now, gate.kept = None, kwargs.get("logits_to_keep", 0)


def after_model(root: nn.Module, args: Any, output: Any) -> None:
    """Forgets the forward that ran; a hook of the outermost transformers model."""
    for gate in root.__dict__[GATES]:
        gate.now, gate.states, gate.kept = None, None, 0


@dataclass
class Gated:
    """What a layer of PEFT keeps that acts on tokens beyond N alone.

    Attributes:
        gate: of the text that it reads.
        is_head: whether it comes behind the sub-model that reads the text.
        axis: of its output where tokens stand, 2 behind heads.
        is_running: whether a call runs.
        is_off: whether it was switched off for the call that runs.
        base: what its original module gave in the call that runs, and the version of that tensor then.
    """

    gate: Gate
    is_head: bool = False
    axis: int = 1
    is_running: bool = False
    is_off: bool = False
    base: tuple[Tensor, int] | None = None

    def note_axis(self, output: Any) -> None:
        """Remembers where tokens stand, for a text of as many tokens as there are heads."""
        states = self.gate.states
        if states is not None and torch.is_tensor(output) and output.dim() == 4:
            heads, tokens = output.shape[1:3]
            if tokens == states.shape[1] != heads:
                self.axis = 2

    def joined(self, beyond: Beyond, on: Any, off: Any) -> Any:
        """What the adapter gives for tokens beyond N, and without it for the others, in each of several outputs.

        Raises:
            PatchError: an output that is no tensor, or that cannot be told apart by tokens.
        """
        if isinstance(on, tuple):
            return tuple(self.joined(beyond, one, other) for one, other in zip(on, off, strict=True))
        if not torch.is_tensor(on):
            raise PatchError(
                f"A layer with a gated adapter gives out a {type(on).__name__}, which has no tokens. Leave it out of "
                "the adapter (`exclude_modules`), or call `ungate_adapter`."
            )
        return torch.where(beyond.fitted(on, self.gate.kept if self.is_head else 0, self.axis), on, off)

    def end(self, layer: Any) -> None:
        """Ends a call."""
        if self.is_off:
            layer._disable_adapters = False
        self.is_running, self.is_off, self.base = False, False, None


def before_layer(layer: Any, args: Any) -> None:
    """Switches an adapter off where it acts on no token; a pre-hook of a layer of PEFT.

    Raises:
        PatchError: an adapter that was merged since, which acts on all tokens.
    """
    gated: Gated = layer.__dict__[GATED]
    gated.end(layer)
    if getattr(layer, "merged", False):
        raise PatchError("A gated adapter was merged, so it acts on text of any length. Call `unmerge_adapter` first.")
    gated.is_running = True
    beyond = None if layer.disable_adapters else gated.gate.present()
    if not layer.disable_adapters and (beyond is None or beyond.is_off()):
        layer._disable_adapters = gated.is_off = True


def after_layer(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """What the layer gives for tokens beyond N, and its original module for the others; a hook of a layer of PEFT.

    Raises:
        PatchError: an output that cannot be told apart by tokens.
    """
    gated: Gated = layer.__dict__[GATED]
    base, was_off = gated.base, gated.is_off or layer.disable_adapters
    gated.end(layer)
    gated.note_axis(output)
    beyond = None if output is None or was_off else gated.gate.present()
    if beyond is None or beyond.is_all:
        return None
    off = base[0] if base is not None and base[0]._version == base[1] else without_adapter(layer, args, kwargs)
    return gated.joined(beyond, output, off)


def without_adapter(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What a layer of PEFT gives with its adapters switched off."""
    layer._disable_adapters = True
    try:
        return layer.forward(*args, **kwargs)
    finally:
        layer._disable_adapters = False


def after_base(base: nn.Module, args: Any, output: Any) -> None:
    """Keeps what the original module gave inside a LoRA layer, so that it need not run twice; a hook of that module."""
    layer: Any = base.__dict__[LAYER]
    gated: Gated = layer.__dict__[GATED]
    is_alone = torch.compiler.is_compiling() or layer.lora_variant or not gated.is_running
    if not is_alone and torch.is_tensor(output) and not output.is_inference():
        gated.base = output, output._version


HOOKS = (before_text, after_text, before_model, after_model, before_layer, after_layer, after_base)


def detach(model: nn.Module) -> None:
    """Takes gates out of a model; nothing to do where there are none."""
    for module in model.modules():
        for name in KEPT:
            module.__dict__.pop(name, None)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook in HOOKS]:
                hooks.pop(key)
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)
