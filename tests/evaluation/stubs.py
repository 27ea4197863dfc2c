"""Models and a tokenizer whose numbers can be worked out by hand."""

import math
from collections.abc import Callable
from types import SimpleNamespace

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY, LIKELY = 50, 40  # ids, and how many of them (the first ones) documents are made of
BOS = 45


class ContextCounter(nn.Module):
    """Predicts every likely token with a weight that depends on nothing but the number of tokens read so far."""

    def __init__(self, weight: Callable[[Tensor], Tensor] = lambda read: torch.log1p(read)) -> None:
        super().__init__()
        self.weight = weight
        self.read: list[Tensor] = []

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        """Logits [B, L, V]: the weight of the context's length on likely tokens, 0 on the others."""
        self.read.append(input_ids)
        counts = torch.arange(1, input_ids.shape[1] + 1, dtype=torch.float32)
        logits = torch.zeros(*input_ids.shape, VOCABULARY)
        logits[..., :LIKELY] = self.weight(counts)[None, :, None]
        return SimpleNamespace(logits=logits)


def known_nll(read: int) -> float:
    """NLL in nats of any likely token after `read` tokens: weight log(1 + read) over 40 of 50 ids."""
    return math.log(LIKELY * (1 + read) + VOCABULARY - LIKELY) - math.log(1 + read)


def documents(*lengths: int, seed: int = 0) -> list[Tensor]:
    """Random documents of likely tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, LIKELY, (length,), generator=generator) for length in lengths]


def tiny_llama(**settings: object) -> LlamaForCausalLM:
    """A random Llama of 32 trained tokens that is sensitive to what it reads."""
    defaults: dict[str, object] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "initializer_range": 0.3,
        "bos_token_id": BOS,
        "eos_token_id": None,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**defaults, **settings})).eval()


def word_tokenizer(*, adds_bos: bool, **special: str) -> PreTrainedTokenizerFast:
    """Words w0 to w39 and `<s>` with id 45; made for 8 tokens, so every document here is longer than its maximum."""
    words = {f"w{token}": token for token in range(LIKELY)} | {"a": 41, "<unk>": 42, "</s>": 44, "<s>": BOS}
    backend = Tokenizer(WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    if adds_bos:
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", model_max_length=8, **special)


def text_of(ids: Tensor) -> str:
    """The text that `word_tokenizer` reads as these ids."""
    return " ".join(f"w{int(token)}" for token in ids)
