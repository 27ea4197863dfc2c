"""How an evaluation calls a model: inside its wrappers, without dropout, on its own device, for its own logits."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

CACHES = ("cache", "past_key_values")
"""Names of the argument of a forward that is its cache, and of what it gives out; the second on older transformers."""


class LengthError(ValueError):
    """A model that cannot read as many tokens."""


def causal_lm(model: nn.Module) -> nn.Module:
    """The transformers model inside wrappers of DDP, `torch.compile` and PEFT (adapters stay active inside it).

    Raises:
        ValueError: prompt-learning adapters, whose virtual tokens would be lost.
    """
    inner: Any = model
    while True:
        if hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        elif isinstance(inner, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = inner.module
        elif hasattr(inner, "peft_config") and hasattr(inner, "get_base_model"):
            if inner.active_peft_config.is_prompt_learning:
                raise ValueError(
                    f"A {inner.active_peft_config.peft_type.value} adapter puts virtual tokens in front of the text, "
                    "which shifts every context length. Evaluate the base model, or an adapter of weights (LoRA)."
                )
            inner = inner.get_base_model()
        else:
            return inner


def is_encoder_decoder(network: Any) -> bool:
    """Whether the config says so."""
    return bool(getattr(getattr(network, "config", None), "is_encoder_decoder", False))


def is_headless(network: Any) -> bool:
    """Whether a transformers model says that nothing turns its hidden states into logits over the vocabulary."""
    return hasattr(network, "get_output_embeddings") and network.get_output_embeddings() is None


def sees_ahead(network: nn.Module) -> bool:
    """Whether the logits of a token depend on the tokens after it: measured on two inputs that differ in the last.

    Raises:
        ValueError: the model gives no logits per token.
    """
    first, second = probe_ids(network)
    with evaluating(network), torch.no_grad():
        one, other = (logits_of(network, ids) for ids in (torch.stack([second, first]), torch.stack([second, second])))
    moved = (one - other).abs().amax(dim=1)  # [positions]
    # Rounding may differ between two runs; a bidirectional model moves its first position about as much as its last.
    return bool(moved[0] > max(1e-4, 4 * torch.finfo(one.dtype).eps) * moved[1])


def logits_of(network: nn.Module, ids: Tensor, cache: Any = None) -> Tensor:
    """The model's own logits, rows flattened: [B * L, V] in the model's dtype.

    Args:
        network: the model.
        ids: int64 [B, L] or [L].
        cache: keys and values of the tokens before; those of `ids` are added.

    Raises:
        LengthError: more tokens than a learned table has rows for.
        ValueError: the model gives no logits per token.
    """
    ids = ids.reshape(-1, ids.shape[-1]).to(device_of(network))
    accepted = inspect.signature(network.forward).parameters
    options: dict[str, Any] = {"use_cache": cache is not None} if "use_cache" in accepted else {}
    if cache is not None:
        options[cache_argument(network) or ""] = cache
    try:
        outputs = network(input_ids=ids, **options)
    except IndexError as error:
        raise LengthError(
            f"The model cannot read {ids.shape[1]} tokens ({error}): a learned position table ends before. Patch the "
            "model, or leave this context length out."
        ) from error
    logits = outputs[0] if isinstance(outputs, tuple) else getattr(outputs, "logits", None)
    if logits is None or logits.ndim != 3:
        raise ValueError(
            f"{type(network).__name__} gives no logits per token. Load the model with AutoModelForCausalLM, or with "
            "AutoModelForMaskedLM if it is an encoder."
        )
    return logits.flatten(0, 1)


def cache_argument(network: nn.Module) -> str | None:
    """What the model's forward calls its cache of keys and values, None where it takes none."""
    accepted = inspect.signature(network.forward).parameters
    return next((name for name in CACHES if name in accepted), None)


def device_of(network: nn.Module) -> torch.device:
    """Where the model reads its input."""
    found = getattr(network, "device", None)
    if isinstance(found, torch.device):
        return found
    return next((parameter.device for parameter in network.parameters()), torch.device("cpu"))


def probe_ids(network: nn.Module) -> tuple[Tensor, Tensor]:
    """Two token ids that are not padding, as tensors without dimensions."""
    padding = getattr(getattr(network, "config", None), "pad_token_id", None)
    first, second = [token for token in range(3) if token != padding][:2]
    return torch.tensor(first), torch.tensor(second)


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Evaluation mode (no dropout); the flag of every module is put back, also where they differed."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
