"""Whether a model reads rows as they are meant: some make their own mask or take no positions, and say nothing."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from hf_posext.mechanisms import root_model
from hf_posext.probe import vocabulary_size
from hf_posext.training.config import DataConfig

PIECE = 4  # tokens of each of the two pieces of a row that is tried
NOTICEABLE = 1e-4  # of the largest output; what is not read changes nothing at all, and rounding is not in question


def first_position(model: nn.Module) -> int:
    """The number from which a model counts positions: 0, or behind those that its table reserves for padding.

    Raises:
        ValueError: positions that are given are not those that it makes itself, wherever they begin.
    """
    tokens = text_of(model)[:1, :PIECE]
    own = answer(model, tokens)
    padding = getattr(root_model(model).config, "pad_token_id", None)
    for first in (0, (padding or 0) + 1):
        if not differs(answer(model, tokens, first + torch.arange(PIECE)), own):
            return first
    raise ValueError(
        f"{type(root_model(model)).__name__} counts positions neither from 0 nor from its padding id, so that rows "
        "cannot say where their tokens stand. Set `data.positions: full` and leave `data.packing` out."
    )


def check_reading(model: nn.Module, config: DataConfig, *, batch_size: int, target_length: int, first: int = 0) -> None:
    """Demands that documents in one row do not see each other, and that positions that jump are read.

    Args:
        model: a causal or masked LM, as it is going to be trained.
        config: how its rows are made.
        batch_size: rows of a batch on one device; flash attention looks for documents in batches of one row only.
        target_length: T in tokens.
        first: position of the first token of a row.

    Raises:
        ValueError: says what the model does, and what to change.
    """
    batch = min(batch_size, 2)
    if config.positions in ("pose", "randomized"):
        check_jumps(model, config.positions, batch, first, target_length)
    elif config.packing or (config.positions == "full" and config.short_fraction):
        check_packs(model, batch, first)


def check_packs(model: nn.Module, batch: int, first: int) -> None:
    """Demands that the second document of a row is read without the first.

    Raises:
        ValueError: it is not.
    """
    tokens = text_of(model)[:, : 2 * PIECE]
    positions = first + torch.arange(PIECE).repeat(2)
    one, other = (answer(model, row.expand(batch, -1), positions)[:, PIECE:] for row in tokens.split(1))
    if differs(one, other):
        raise ValueError(
            f"{type(root_model(model)).__name__} lets the documents of a row see each other in batches of {batch} with "
            f"{implementation(model)} attention. Leave `data.packing` and `data.short_fraction` out, or change "
            "`attn_implementation`; flash attention keeps them apart in batches of one row."
        )


def check_jumps(model: nn.Module, positions: str, batch: int, first: int, target_length: int) -> None:
    """Demands that a token behind a jump is read at its position, and with all tokens before it.

    Raises:
        ValueError: it is not.
    """
    tokens = text_of(model)[:, : 2 * PIECE].repeat_interleave(batch, 0)
    plain = torch.arange(2 * PIECE)
    jumping = torch.where(plain < PIECE, plain, plain + target_length - 2 * PIECE)
    one, other = answer(model, tokens[:batch], first + jumping), answer(model, tokens[batch:], first + jumping)
    name, way = type(root_model(model)).__name__, f"`data.positions: {positions}`"
    if not differs(answer(model, tokens[:batch], first + plain), one):
        raise ValueError(
            f"{name} does not read the positions that it is given, so {way} changes nothing. Set it to full."
        )
    if not differs(one[:, PIECE:], other[:, PIECE:]):
        raise ValueError(
            f"{name} takes a jump between positions for a new document in batches of {batch} with "
            f"{implementation(model)} attention, so {way} would only cut its rows up. Change `attn_implementation`; "
            "flash attention reads jumps in batches of two rows and more."
        )


def text_of(model: nn.Module) -> Tensor:
    """Two rows whose second halves are the same, int64 [2, 2 x 4]."""
    size = vocabulary_size(root_model(model).config)
    row = (size // 2 + torch.arange(3 * PIECE)) % size
    return torch.stack([row[: 2 * PIECE], torch.cat([row[2 * PIECE :], row[PIECE : 2 * PIECE]])])


@torch.no_grad()
def answer(model: nn.Module, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
    """Logits in fp32 on the CPU, [B, L, V]; as in training without a cache, which would take the place of a mask.

    A mask of ones is given unless positions begin anew.
    """
    inputs: dict[str, Any] = {"input_ids": tokens}
    if positions is not None:
        inputs["position_ids"] = positions.expand(len(tokens), -1)
    if positions is None or (positions.diff() > 0).all():
        inputs["attention_mask"] = torch.ones_like(tokens)
    device = next(model.parameters()).device
    inputs = {name: value.to(device) for name, value in inputs.items()}
    if "use_cache" in inspect.signature(root_model(model).forward).parameters:
        inputs["use_cache"] = False
    modes = [(module, module.training) for module in model.modules()]
    try:
        return model.eval()(**inputs).logits.float().cpu()
    finally:
        for module, mode in modes:
            module.training = mode


def differs(one: Tensor, other: Tensor) -> bool:
    """Whether two outputs differ by more than rounding."""
    return bool((one - other).abs().max() > NOTICEABLE * one.abs().max())


def implementation(model: nn.Module) -> str:
    """How the model computes attention, in the words of transformers."""
    return str(getattr(root_model(model).config, "_attn_implementation", None))
