"""What the tiny models of the sweep read, and what they say to it."""

import inspect
from typing import Any

import torch

from tests.architectures import VOCABULARY
from tests.shrink import FIRST_TEXT_TOKEN

LENGTH = 16


def text_inputs(model: Any, length: int = LENGTH, padding: int = 1, spread: bool = False) -> dict[str, Any]:
    """Text for any architecture. Its last token is masked: a mask of ones is dropped by some models, and without a mask
    gapped positions are taken for packed documents.

    Args:
        model: the model that is to read it.
        length: in tokens.
        padding: how many tokens at the end are masked.
        spread: put a masked token behind each token, so that token i stands at position 2i whatever the model makes
            its positions from.
    """
    accepted = inspect.signature(model.forward).parameters
    vocabulary = getattr(model.config.get_text_config(decoder=True), "vocab_size", VOCABULARY)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(FIRST_TEXT_TOKEN, vocabulary // 2), vocabulary, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[:, length - padding :] = 0
    if spread:
        ids = ids.repeat_interleave(2, dim=1)
        mask = torch.stack([mask, torch.zeros_like(mask)], dim=2).flatten(1)
    text = {"input_ids": ids, "attention_mask": mask}
    inputs = {
        **text,
        **{f"decoder_{name}": value for name, value in text.items()},
        "bbox": torch.zeros(*ids.shape, 4, dtype=torch.float if "decoder_input_ids" in accepted else torch.long),
        "use_cache": False,
    }
    passed_on = {"attention_mask", "use_cache"} if "kwargs" in accepted else set()
    return {name: value for name, value in inputs.items() if name in {"input_ids", *accepted, *passed_on}}


@torch.no_grad()
def logits(model: Any, positions: torch.Tensor | None = None, spread: bool = False) -> torch.Tensor:
    """What the model says to the text [B, L - 1, V], at its own positions, at given ones [L] or at every other one."""
    inputs = text_inputs(model, spread=spread)
    if positions is not None:
        inputs |= {name: positions[None].expand(2, -1) for name in position_arguments(model)}
    return answer(model, inputs)[:, : -1 - spread : 1 + spread]


@torch.no_grad()
def answer(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """The logits, or what a model gives first where it has none; the same for the same inputs."""
    with torch.random.fork_rng():
        torch.manual_seed(0)  # some draw noise in their forward
        output = model(**inputs)
    found = getattr(output, "logits", None)
    return output[0] if found is None else found


def position_arguments(model: Any) -> list[str]:
    """The arguments of `forward` that may take positions."""
    accepted = inspect.signature(model.forward).parameters
    named = [name for name in ("position_ids", "decoder_position_ids") if name in accepted]
    return named or (["position_ids"] if "kwargs" in accepted else [])
