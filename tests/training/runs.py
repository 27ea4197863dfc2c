"""Tiny models and texts that a run of a few steps is done with, and what is asked of what it leaves."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from hf_posext import FinetuneConfig

N, T, VOCABULARY = 16, 64, 61
TRAINING = {
    "per_device_train_batch_size": 2,
    "max_steps": 6,
    "learning_rate": 1e-2,
    "warmup_steps": 0,
    "logging_steps": 1,
    "save_steps": 2,
    "use_cpu": True,
    "seed": 3,
}


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    """A random decoder trained for N tokens, if it were."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    options = {"vocab_size": VOCABULARY, "max_position_embeddings": N, "initializer_range": 0.3, **sizes, **ends}
    return LlamaForCausalLM(LlamaConfig(**options | changes)).eval()


def tiny_gpt2() -> GPT2LMHeadModel:
    """A random decoder with a table of N rows, whose head is its embedding."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": N}
    return GPT2LMHeadModel(GPT2Config(initializer_range=0.3, bos_token_id=0, eos_token_id=1, **sizes)).eval()


def tiny_bert() -> BertForMaskedLM:
    """A random encoder with a table of N rows."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    options = {"vocab_size": VOCABULARY, "max_position_embeddings": N, "initializer_range": 0.3, **sizes}
    return BertForMaskedLM(BertConfig(**options)).eval()


def documents(count: int = 6, tokens: int = 300, seed: int = 1) -> list[list[int]]:
    """Texts of token ids in which every token is the sum of two before it, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for _ in range(count):
        text = torch.randint(2, VOCABULARY, (8,), generator=generator).tolist()
        while len(text) < tokens:
            text.append(2 + (text[-1] + text[-7]) % (VOCABULARY - 2))
        texts.append(text)
    return texts


def config(folder: Path, **changes: Any) -> FinetuneConfig:
    """A run of six steps: pi, four times N."""
    data: dict[str, Any] = {
        "output_dir": str(folder),
        "patch": {"method": "pi", "factor": T // N},
        "evaluation": {"targets": 8},
        "training": TRAINING,
    }
    for name, value in changes.items():
        data[name] = data[name] | value if isinstance(value, dict) and isinstance(data.get(name), dict) else value
    return FinetuneConfig.from_dict(data)


def text(tokens: int, rows: int = 2) -> Tensor:
    """Token ids [rows, tokens]."""
    return torch.randint(2, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(5))


def logits(model: Any, ids: Tensor) -> Tensor:
    """What a model says."""
    with torch.no_grad():
        return model(input_ids=ids).logits


def saved_base(folder: Path, model: Any) -> Any:
    """A model from the disk, so that an adapter knows its base."""
    model.save_pretrained(folder)
    kind = AutoModelForMaskedLM if "MaskedLM" in type(model).__name__ else AutoModelForCausalLM
    return kind.from_pretrained(folder).eval()


def weights(folder: Path) -> dict[str, Tensor]:
    """What an adapter holds."""
    return load_file(folder / "adapter_model.safetensors")


class FrameTokenizer:
    """What a masked LM needs of a tokenizer: its size, a mask, and a token before and after a text."""

    mask_token_id, all_special_ids, pad_token_id, eos_token_id, model_max_length = 1, [0, 1], 0, None, N

    def __call__(self, text: str, add_special_tokens: bool = True, **options: Any) -> dict[str, list[int]]:
        """One token per character."""
        ids = [2 + ord(letter) % (VOCABULARY - 2) for letter in text]
        return {"input_ids": [0, *ids, 0] if add_special_tokens else ids}

    def __len__(self) -> int:
        """Its tokens."""
        return VOCABULARY

    def save_pretrained(self, folder: str) -> None:
        """Nothing to save."""
