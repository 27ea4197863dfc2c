"""Masked LMs, a tokenizer with a mask token, and the pseudo-perplexity written once more, slowly, token by token."""

import functools
import hashlib
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

TRAINED, VOCABULARY = 32, 50
PAD, UNK, CLS, SEP, MASK = range(5)
FIRST, LIKELY = 10, 40  # ids below the first are special or rare; so many from there on are what documents are made of
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": TRAINED,
    "initializer_range": 0.3,
    "pad_token_id": PAD,
    "bos_token_id": CLS,
    "eos_token_id": SEP,
}
RESERVING = {"pad_token_id": 1, "max_position_embeddings": TRAINED + 2}  # rows up to the padding id stand for nothing
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": RESERVING,
    "xlm-roberta": RESERVING,
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "electra": {"embedding_size": 16},
    "albert": {"embedding_size": 16},
    "mpnet": RESERVING,
    "modernbert": {"local_attention": 8, "cls_token_id": CLS, "sep_token_id": SEP},
}


def build(family: str = "bert", **changes: Any) -> Any:
    """A tiny random masked LM of 32 tokens that is sensitive to what it reads."""
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **changes})
    torch.manual_seed(0)
    return transformers.AutoModelForMaskedLM.from_config(config).eval()


def masking_tokenizer(*, has_mask: bool = True, adds_special: bool = True) -> PreTrainedTokenizerFast:
    """Words w10 to w49, each its id, between [CLS] and [SEP]."""
    words = {"[PAD]": PAD, "[UNK]": UNK, "[CLS]": CLS, "[SEP]": SEP, "a": 5} | ({"[MASK]": MASK} if has_mask else {})
    backend = Tokenizer(
        WordLevel(words | {f"w{token}": token for token in range(FIRST, VOCABULARY)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = Whitespace()
    if adds_special:
        around = [("[CLS]", CLS), ("[SEP]", SEP)]
        backend.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=8, **special, **({"mask_token": "[MASK]"} if has_mask else {})
    )


def documents(*lengths: int, seed: int = 0) -> list[Tensor]:
    """Random documents of likely tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(FIRST, FIRST + LIKELY, (length,), generator=generator) for length in lengths]


class PlaceCounter(nn.Module):
    """Gives every likely token a weight that depends on nothing but its place: log(1 + place), the first being 1.

    It sees ahead as far as that shows: a padding token anywhere raises all logits but those of likely tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read: list[Tensor] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> SimpleNamespace:
        """Logits [B, L, V]; nothing is ever padded."""
        self.read.append(input_ids)
        logits = (input_ids == PAD).any(1)[:, None, None].float().expand(*input_ids.shape, VOCABULARY).clone()
        logits[..., FIRST:] = torch.log1p(torch.arange(1.0, input_ids.shape[1] + 1))[None, :, None]
        return SimpleNamespace(logits=logits)


def draw_of(document: list[int], place: int, seed: int = 0, share: float = 0.15) -> int:
    """The draw that masks a token, however many there are: eight bytes of a hash of the document say it."""
    eight = stream_of(tuple(document), seed)[8 * place : 8 * place + 8]
    return int((int.from_bytes(eight, "little") >> 11) / 2**53 / share)


@functools.cache
def stream_of(document: tuple[int, ...], seed: int) -> bytes:
    """Eight bytes for each token."""
    data = f"{seed}:".encode() + b"".join(token.to_bytes(8, "little") for token in document)
    return hashlib.shake_256(data).digest(8 * len(document))


def slow_places(document: Tensor, length: int, targets: int) -> dict[int, int]:
    """Masked token -> where its window begins, in tokens of the document; four draws.

    Args:
        document: token ids without special tokens.
        length: context length in tokens.
        targets: tokens at the end of the document among which the masked ones are scored.
    """
    ids, room = document.tolist(), length - 2
    start, parts = len(ids) - targets, -(-targets // room)
    found = {}
    for place in (place for place in range(start, len(ids)) if draw_of(ids, place) < 4):
        end = next(end for part in range(parts) if place < (end := start + (part + 1) * targets // parts))
        found[place] = max(end - room, start) if parts > 1 else end - room
    return found


def slow_nll(model: nn.Module, document: Tensor, length: int, targets: int) -> dict[int, float]:
    """Masked token -> NLL in nats, from the whole logits of one window at a time, float64; arguments as before."""
    ids, found = document.tolist(), {}
    logits: dict[tuple[int, int], Tensor] = {}
    for place, begin in slow_places(document, length, targets).items():
        draw = draw_of(ids, place)
        if (begin, draw) not in logits:
            hidden = [MASK if draw_of(ids, at) == draw else ids[at] for at in range(begin, begin + length - 2)]
            window = torch.tensor([[CLS, *hidden, SEP]])
            with torch.no_grad():
                whole = model(input_ids=window, attention_mask=torch.ones_like(window)).logits[0]
            logits[begin, draw] = torch.log_softmax(whole.double(), dim=-1)
        found[place] = -float(logits[begin, draw][place - begin + 1, ids[place]])
    return found
