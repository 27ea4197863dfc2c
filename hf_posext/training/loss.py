"""Cross-entropy in fp32 that never holds the logits of a whole batch, for any model that transformers can train.

The logits of a long row are by far the largest tensor of a training step, and the loss needs them in fp32 and once more
for the gradient. So the model runs up to its hidden states, and its own head sees `chunk` rows with a label at a time;
their logits are thrown away and made again on the way back. `torch.nn.functional.linear_cross_entropy` would do as much
for a plain linear head only, and in torch 2.13 it gives a bf16 loss for bf16 inputs (9280 in place of 9239).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutput

from hf_posext.compat import quiet
from hf_posext.evaluation.forwards import (
    causal_lm,
    device_of,
    evaluating,
    is_encoder_decoder,
    is_headless,
    probe_ids,
)
from hf_posext.evaluation.heads import find_backbone, replaced, run_backbone, run_head
from hf_posext.evaluation.protocols import check_count

IGNORED = -100
"""The label of a token that is not to be predicted."""
NO_HEAD = "A loss over tokens needs a head with logits for each token of the input: {kind} {what}. {hint}"
LOAD = "Load the model with AutoModelForCausalLM or AutoModelForMaskedLM."
Head = Callable[[Tensor], Tensor]
"""From rows, as many as are given, to their logits [rows, V]."""
logger = logging.getLogger(__name__)


@contextmanager
def loss_without_logits(model: nn.Module, *, chunk: int = 1024) -> Iterator[None]:
    """For the length of the block, a forward with `labels=` gives the loss in fp32 and nothing else.

    Labels mean what they do in the model's own loss: -100 is not predicted, and a causal model predicts each other one
    at the token before it.
    `num_items_in_batch=`, which Trainer gives, divides the sum of the losses, so that each token weighs the same over
    accumulated steps and processes; else the number of labels does. A forward without `labels=` is the model's own.
    Wrap the model (DDP, FSDP, `torch.compile`) and make the Trainer inside the block.

    Args:
        model: a causal or masked LM of transformers, patched or not, also inside PEFT.
        chunk: rows of hidden states that the head sees at a time, at least 1.

    Raises:
        TypeError: `chunk` is no whole number.
        ValueError: `chunk` is out of range; the model is an encoder-decoder, or has no LM head or no loss; adapters put
            virtual tokens in front of the text; in a forward, the model has a loss of its routers or tokens of its own.
    """
    check_count("chunk", chunk)
    network = causal_lm(model)
    check_head(network)
    with evaluating(network), torch.no_grad():
        backbone, shift = find_backbone(network), int(predicts_next(network))
    if backbone is None:
        logger.info("The head of %s cannot be run on single rows: its logits are held.", type(network).__name__)
    forward = _losing(network.forward, backbone, shift, chunk)
    # Trainer gives `num_items_in_batch` to a model that says so, and counts the labels that its kind of loss asks for
    kind = "ForCausalLM" if shift else "ForMaskedLM"
    with replaced(network, forward=forward, accepts_loss_kwargs=True, loss_type=kind):
        yield


def check_head(network: nn.Module) -> None:
    """Refuses a model that has no logits for each token of its input.

    Raises:
        ValueError: says what is missing and how to load the model.
    """
    kind = type(network).__name__
    if is_encoder_decoder(network):
        hint = "Load a decoder-only model or an encoder."
        raise ValueError(NO_HEAD.format(kind=kind, what="is an encoder-decoder", hint=hint))
    if is_headless(network):
        raise ValueError(NO_HEAD.format(kind=kind, what="has none", hint=LOAD))


def predicts_next(network: Any) -> bool:
    """Whether the model's own loss asks for the label of a token at the token before it: measured on a first token.

    Raises:
        ValueError: the model has no loss.
    """
    ids = torch.stack(probe_ids(network)).to(device_of(network))[None]
    labels = nn.functional.pad(ids[:, :1], (0, 1), value=IGNORED)
    with quiet():  # a class that has the default loss because it names none says so
        loss = getattr(network(input_ids=ids, labels=labels, **_no_cache(network.forward)), "loss", None)
    if loss is None:
        raise ValueError(f"{type(network).__name__} has no loss of its own for labels to be meant by. {LOAD}")
    return bool(loss.isnan())  # the mean over no label


def _no_cache(forward: Callable[..., Any]) -> dict[str, bool]:
    """The option that keeps a model from filling a cache, where it has one."""
    return {"use_cache": False} if "use_cache" in inspect.signature(forward).parameters else {}


def _losing(own_forward: Callable[..., Any], backbone: nn.Module | None, shift: int, chunk: int) -> Callable[..., Any]:
    """A `forward` that answers labels with a loss, and takes the parameters of the model's own.

    Args:
        own_forward: the model's.
        backbone: what its head reads; None where the head cannot be run on single rows.
        shift: how many tokens before its own a label is asked for.
        chunk: rows that the head sees at a time.
    """
    answer = torch.compiler.disable(_answer)  # its number of chunks changes from text to text
    no_cache = _no_cache(own_forward)

    @wraps(own_forward)
    def forward(
        *args: Any, labels: Tensor | None = None, num_items_in_batch: int | Tensor | None = None, **kwargs: Any
    ) -> Any:
        if labels is None:
            return own_forward(*args, **kwargs)
        targets = nn.functional.pad(labels[:, shift:], (0, shift), value=IGNORED).flatten()
        states, head = _split(backbone, partial(own_forward, *args, **{**no_cache, **kwargs}))
        return answer(states.flatten(0, 1), targets, head, chunk=chunk, count=num_items_in_batch)

    return torch.compiler.disable(forward, recursive=False)  # the model itself is compiled


def _split(backbone: nn.Module | None, call: Callable[[], Any]) -> tuple[Tensor, Head]:
    """Hidden states [B, L, hidden] of a call and what makes logits of any of them; logits where there is no backbone.

    Raises:
        ValueError: the model has a loss of its routers.
    """
    outputs: Any
    outputs, result = (None, call()) if backbone is None else run_backbone(backbone, call)
    if getattr(result, "aux_loss", None) is not None:
        raise ValueError(
            "The model has a loss of its routers, which this loss leaves out. Set `output_router_logits` to False, or "
            "train with the model's own loss."
        )
    if backbone is None:
        return result[0], lambda logits: logits
    return outputs[0], lambda hidden: run_head(backbone, outputs, hidden, call)[0][0]


def _answer(states: Tensor, targets: Tensor, head: Head, *, chunk: int, count: int | Tensor | None) -> CausalLMOutput:
    """The loss of all tokens, by hidden states [B * L, hidden] or logits; `count` divides the sum.

    Raises:
        ValueError: the model has tokens of its own.
    """
    if len(states) != len(targets):
        raise ValueError(
            f"The model makes {len(states)} tokens of {len(targets)} labels, so it has some of its own. Train it with "
            "its own loss."
        )
    counted = targets != IGNORED
    total = _summed(states[counted.to(states.device)], targets[counted], head, chunk)
    count = torch.as_tensor(counted.sum() if count is None else count, device=total.device)
    return CausalLMOutput(loss=total / count.clamp(min=1))


def _summed(states: Tensor, targets: Tensor, head: Head, chunk: int) -> Tensor:
    """Sum of the cross-entropy of rows in fp32; without rows 0, on which all that made the states still depends."""

    def of(states: Tensor, targets: Tensor) -> Tensor:
        logits = head(states).float()  # [<= chunk, V]; the loss of bf16 logits would itself be rounded to bf16
        return nn.functional.cross_entropy(logits, targets.to(logits.device), reduction="sum")

    run = of if len(states) <= chunk else partial(checkpoint, of, use_reentrant=False)
    pieces = zip(states.split(chunk), targets.split(chunk), strict=True)
    return sum((run(*piece) for piece in pieces), start=torch.zeros((), dtype=torch.float32))
