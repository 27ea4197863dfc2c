"""Gated adapters in the tests: which models and which adapters there are, and a LoRA that is written out by hand."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from hf_posext import patch_model
from hf_posext.gating import gate_adapter
from tests import dynamic, tables
from tests.architectures import tiny_model
from tests.mechanisms import alibi_models

FACTOR = 4


@dataclass(frozen=True)
class Case:
    """A tiny model with a dynamic patch, as data."""

    make: Callable[[], Any]
    """The unpatched model, the same each time."""
    method: str
    trained_length: int
    by_row: bool
    """Whether rows decide, as in encoders and with tables of positions."""
    whole: tuple[str, ...]
    """Modules that LoRA+ trains whole: embedding and norms."""
    embedding: str
    config: Mapping[str, Any] = field(default_factory=dict)
    """What its LoRA needs besides."""

    def patched(self) -> Any:
        """The model with its patch."""
        return patch_model(self.make(), self.method, FACTOR, dynamic=True)

    def head(self) -> str:
        """Name of the head, which lies behind the sub-model that reads the text; transformers has renamed some."""
        model = self.make()
        return next(name for name, module in model.named_modules() if module is model.get_output_embeddings())


CASES = {
    "llama": Case(
        lambda: tiny_model("llama"), "yarn", 32, False, ("embed_tokens", "norm", "input_layernorm"),
        "embed_tokens",
    ),
    "gpt_neox": Case(
        lambda: tiny_model("gpt_neox"), "ntk", 32, False, ("embed_in", "input_layernorm", "final_layer_norm"),
        "embed_in",
    ),
    "gemma3": Case(lambda: tiny_model("gemma3"), "pi", 32, False, ("norm", "q_norm"), "embed_tokens"),
    "bloom": Case(
        lambda: alibi_models.tiny("bloom"), "pi", alibi_models.N, False, ("word_embeddings", "ln_f", "input_layernorm"),
        "word_embeddings",
    ),
    "gpt2": Case(lambda: tables.make("gpt2"), "pi", 32, True, ("ln_1", "ln_f"), "wte", config={"fan_in_fan_out": True}),
    "bert": Case(lambda: tables.make("bert"), "pi", 32, True, ("LayerNorm",), "word_embeddings"),
    "bart": Case(lambda: tables.make("bart"), "pi", 32, True, ("final_layer_norm",), "shared"),
    "modernbert": Case(lambda: tiny_model("modernbert"), "yarn", 32, True, ("final_norm",), "tok_embeddings"),
}  # fmt: skip
CAUSAL = [name for name, case in CASES.items() if name in ("llama", "gpt_neox", "gemma3", "bloom")]
BY_ROW = [name for name, case in CASES.items() if case.by_row]


def lora(case: Case, **changes: Any) -> LoraConfig:
    """A LoRA on every linear layer of the stack."""
    return LoraConfig(**{"r": 2, "target_modules": "all-linear", "init_lora_weights": False, **case.config, **changes})


ADAPTERS: dict[str, Callable[[Case], Any]] = {
    "lora": lora,
    "dora": lambda case: lora(case, use_dora=True),
    "embedding": lambda case: lora(case, target_modules=[case.embedding]),
    "whole": lambda case: lora(case, modules_to_save=list(case.whole)),
    "head": lambda case: lora(case, modules_to_save=[case.head()]),
    "head_lora": lambda case: lora(case, target_modules=[case.head()]),
    "tokens": lambda case: lora(case, trainable_token_indices={case.embedding: [7, 8, 9, 10, 11, 12, 13, 14]}),
    "ia3": lambda case: IA3Config(target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"]),
}


def adapted(case: Case, adapter: str = "lora", model: Any = None) -> Any:
    """A patched model under an adapter that is far from the identity, the same each time."""
    torch.manual_seed(1)
    model = get_peft_model(case.patched() if model is None else model, ADAPTERS[adapter](case)).eval()
    kept = [name for name, _ in model.named_modules() if name.endswith("modules_to_save.default")]
    assert bool(kept) == (adapter in ("whole", "head"))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def gated(case: Case, adapter: str = "lora") -> Any:
    """The same, gated."""
    return gate_adapter(adapted(case, adapter))


def by_hand(model: Any, gated_model: Any, beyond: Tensor) -> Any:
    """A patched model without PEFT that adds scaling * B A x of another one's LoRA for the tokens of a mask, [B, L]."""

    def add(low: Tensor, high: Tensor, scaling: float) -> Any:
        def hook(module: Any, args: Any, output: Tensor) -> Tensor:
            return output + scaling * (args[0] @ low.T @ high.T) * beyond[..., None]

        return hook

    for name, module in gated_model.get_base_model().named_modules():
        if hasattr(module, "lora_A"):
            low, high = module.lora_A["default"].weight.detach(), module.lora_B["default"].weight.detach()
            model.get_submodule(name).register_forward_hook(add(low, high, module.scaling["default"]))
    return model


def read(model: Any, tokens: Tensor, **inputs: Any) -> Tensor:
    """Logits of one pass without a cache, [B, L, V]; the decoder of a pair reads the same tokens as its encoder."""
    kind = model.config.model_type
    if kind in tables.BY_TYPE:
        with torch.no_grad():
            return tables.read(model, tokens, **inputs)
    return no_cache(model, tokens, **inputs).detach()


def no_cache(model: Any, tokens: Tensor, **inputs: Any) -> Tensor:
    """As `read` of a model that is no pair, differentiable where gradients are on."""
    options = {} if model.config.model_type == "modernbert" else {"use_cache": False}
    return model(input_ids=tokens, **options, **inputs).logits


def in_pieces(model: Any, tokens: Tensor, sizes: list[int], cache: Any) -> Tensor:
    """As `tests.dynamic.in_pieces`, of a model that may be inside PEFT, which knows the cache by its old name alone."""
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    return dynamic.in_pieces(inner, tokens, sizes, cache)
