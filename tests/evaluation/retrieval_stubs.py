"""Models that copy exactly, as far as they reach, so that it is known which trials they answer."""

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

WORDS = 997  # ids, so many that three in a row hardly ever come twice by chance
TRAINED = 96
MATCH = 3  # tokens that must be alike for what followed them to be repeated


def continuation(ids: Tensor, reach: int) -> Tensor:
    """[B, L]: what followed the nearest earlier place that reads like the last three tokens; 0 where there is none.

    A place is read only if it is at most `reach` tokens before.
    """
    same = ids[:, :, None] == ids[:, None, :]  # [B, L, L]
    alike = same.clone()
    for back in range(1, MATCH):
        earlier = torch.zeros_like(same)
        earlier[:, back:, back:] = same[:, :-back, :-back]
        alike &= earlier
    places = torch.arange(ids.shape[1])
    distance = places[:, None] - places
    usable = alike & (distance > 0) & (distance <= reach)
    nearest = (usable * (places + 1)).amax(-1)  # one past the matching place, which is where its successor stands
    return torch.where(nearest > 0, ids.gather(1, nearest), 0)


class Reader(nn.Module):
    """Copies from at most `reach` tokens before, and has no `generate`."""

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach = reach
        self.embedding = nn.Embedding(WORDS, 1)

    def get_input_embeddings(self) -> nn.Embedding:
        """Says how many ids there are."""
        return self.embedding

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        """Logits [B, L, V]."""
        return SimpleNamespace(logits=nn.functional.one_hot(continuation(input_ids, self.reach), WORDS).float())


class Copier(LlamaForCausalLM):
    """Generates by copying from as far back as its config says that it reads, so a patch makes it reach farther."""

    reach_share = 1.0

    @functools.wraps(LlamaForCausalLM.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As Llama, which fills the cache; the logits are made of all ids that were read."""
        outputs = super().forward(*args, **kwargs)
        ids, cache = args[0] if args else kwargs["input_ids"], outputs[1] if len(outputs) > 1 else None
        goes_on = cache is not None and cache.get_seq_length() > ids.shape[1]
        self.__dict__["read"] = torch.cat([self.__dict__["read"], ids], dim=1) if goes_on else ids
        reach = int(self.reach_share * self.config.max_position_embeddings)
        made = continuation(self.__dict__["read"], reach)[:, -outputs.logits.shape[1] :]
        outputs.logits = nn.functional.one_hot(made, WORDS).float()
        return outputs


class Forgetful(Copier):
    """Cannot copy at all."""

    reach_share = 0.0


class Fragile(Copier):
    """Cannot copy once it is patched."""

    @property
    def reach_share(self) -> float:  # type: ignore[override]
        """Everything as long as the model reads what it was trained for."""
        return float(self.config.max_position_embeddings == TRAINED)


def copier(kind: type[Copier] = Copier) -> Copier:
    """A copier of 96 trained tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=TRAINED,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return kind(config).eval()
