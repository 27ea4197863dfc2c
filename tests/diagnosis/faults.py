"""Faults, each planted in a healthy model, and the check that is meant to find it."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama

from hf_posext import patch_model, record_of
from tests.architectures import TRAINED_LENGTH, tiny_config, tiny_model
from tests.diagnosis.healthy import MODELS

N = TRAINED_LENGTH
LONG = 65_536
Plant = Callable[[Any, pytest.MonkeyPatch], Any]


@dataclass(frozen=True)
class Fault:
    """One fault, as data."""

    check: str
    """Which check is meant to find it."""
    healthy: Callable[[], Any]
    """A fresh model without it."""
    plant: Plant
    """Puts it in; gives a tokenizer where the fault is in that."""


def with_positions(module: Any, change: Callable[[torch.Tensor], Any]) -> None:
    """A rotary module that is asked for other positions than it is given."""
    forward = module.forward
    module.forward = lambda x, position_ids, **more: forward(x, change(position_ids), **more)


def round_frequencies(model: Any, _: pytest.MonkeyPatch) -> None:
    buffers = model.model.rotary_emb._buffers
    buffers["inv_freq"] = buffers["inv_freq"].to(torch.bfloat16)


def cast_frequencies_in_place(model: Any, _: pytest.MonkeyPatch) -> None:
    buffer = model.model.rotary_emb.inv_freq
    buffer.data = buffer.data.half().float()


def edit_config(model: Any, _: pytest.MonkeyPatch) -> None:
    model.config.rope_parameters = {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": N
    }  # fmt: skip


def edit_theta(model: Any, _: pytest.MonkeyPatch) -> None:
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 500_000.0}


def cut_positions(model: Any, _: pytest.MonkeyPatch) -> None:
    with_positions(model.model.rotary_emb, lambda positions: positions.clamp(max=N - 1))


def repeat_positions(model: Any, _: pytest.MonkeyPatch) -> None:
    with_positions(model.model.rotary_emb, lambda positions: positions % N)


def halve_positions(model: Any, _: pytest.MonkeyPatch) -> None:
    with_positions(model.model.rotary_emb, lambda positions: positions.to(torch.bfloat16))


def rotate_twice(_: Any, patching: pytest.MonkeyPatch) -> None:
    rotate = modeling_llama.apply_rotary_pos_emb
    twice = lambda q, k, cos, sin, **more: rotate(*rotate(q, k, cos, sin, **more), cos, sin, **more)  # noqa: E731
    patching.setattr(modeling_llama, "apply_rotary_pos_emb", twice)


def rotate_never(_: Any, patching: pytest.MonkeyPatch) -> None:
    patching.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, *args, **more: (q, k))


@torch.no_grad()
def zero_table(model: Any, _: pytest.MonkeyPatch) -> None:
    model.transformer.wpe.weight.zero_()


@torch.no_grad()
def level_table(model: Any, _: pytest.MonkeyPatch) -> None:
    model.transformer.wpe.weight.copy_(model.transformer.wpe.weight[:1].expand(N, -1))


def drop_table(model: Any, _: pytest.MonkeyPatch) -> None:
    model.transformer.wpe.forward = lambda places: torch.zeros(*places.shape, 64)


def drop_position_ids(model: Any, _: pytest.MonkeyPatch) -> None:
    forward = model.model.forward
    model.model.forward = lambda *args, position_ids=None, **more: forward(*args, **more)


def restart_at_0(model: Any, _: pytest.MonkeyPatch) -> None:
    forward = model.model.forward

    def restarted(input_ids: torch.Tensor, *args: Any, **more: Any) -> Any:
        return forward(input_ids, *args, **{**more, "position_ids": torch.arange(input_ids.shape[1])[None]})

    model.model.forward = restarted


def count_slots(model: Any, _: pytest.MonkeyPatch) -> None:
    table = model.model.decoder.embed_positions

    def by_slot(attention_mask: torch.Tensor, past: int = 0, **_: Any) -> torch.Tensor:
        return nn.functional.embedding(torch.arange(past, attention_mask.shape[1])[None] + table.offset, table.weight)

    table.forward = by_slot


def drop_mask(model: Any, _: pytest.MonkeyPatch) -> None:
    forward = model.model.forward
    model.model.forward = lambda *args, attention_mask=None, **more: forward(*args, **more)


def cut_tokenizer(_: Any, __: pytest.MonkeyPatch) -> Any:
    return SimpleNamespace(model_max_length=N // 2)


def leave_tokenizer(model: Any, _: pytest.MonkeyPatch) -> Any:
    return SimpleNamespace(model_max_length=N)  # the patch was made without `tokenizer=`


def shorten_table(model: Any, _: pytest.MonkeyPatch) -> None:
    model.transformer.wpe = nn.Embedding.from_pretrained(model.transformer.wpe.weight[: N - 8].detach())


def record_alone(model: Any, _: pytest.MonkeyPatch) -> None:
    record = record_of(patch_model(tiny_model("llama"), "self_extend", 2))
    assert record is not None
    model.config.posext = record.to_dict()


def replace_module(model: Any, _: pytest.MonkeyPatch) -> None:
    model.model.rotary_emb = type(tiny_model("llama").model.rotary_emb)(tiny_config("llama"))


def keep_longer_record(model: Any, _: pytest.MonkeyPatch) -> None:
    patched = patch_model(tiny_model("llama"), "pi", 2)
    model.config.posext = copy.deepcopy(patched.config.posext)
    model.config.rope_parameters = copy.deepcopy(patched.config.rope_parameters)


def long_llama() -> Any:
    from transformers import LlamaForCausalLM

    config = tiny_config("llama")
    config.max_position_embeddings = LONG
    return LlamaForCausalLM(config).eval()


def long_bloom() -> Any:
    model = MODELS["bloom"]()
    model.config.seq_length = 512
    return model


FAULTS: dict[str, Fault] = {
    "frequencies in bf16": Fault("angles", MODELS["llama"], round_frequencies),
    "frequencies rounded in place": Fault("angles", MODELS["llama"], cast_frequencies_in_place),
    "frequencies of a patch rounded in place": Fault("angles", MODELS["llama_yarn_patched"], cast_frequencies_in_place),
    "config edited to yarn": Fault("config", MODELS["llama"], edit_config),
    "theta edited": Fault("config", MODELS["llama"], edit_theta),
    "a pi checkpoint's config over plain modules": Fault("config", MODELS["llama"], keep_longer_record),
    "positions cut at N": Fault("turns", MODELS["llama_pi"], cut_positions),
    "positions repeated after N": Fault("turns", MODELS["llama_pi"], repeat_positions),
    "rotated twice": Fault("rotation", MODELS["llama"], rotate_twice),
    "rotated twice on a patch": Fault("rotation", MODELS["llama_yarn_dynamic"], rotate_twice),
    "not rotated": Fault("rotation", MODELS["llama"], rotate_never),
    "order lost": Fault("order", MODELS["llama"], rotate_never),
    "nothing to switch off": Fault("ablation", MODELS["llama"], rotate_never),
    "table of zeros": Fault("magnitudes", MODELS["gpt2"], zero_table),
    "table of equal rows": Fault("magnitudes", MODELS["gpt2"], level_table),
    "neighbours with equal rows": Fault("collisions", MODELS["gpt2"], level_table),
    "table not looked up": Fault("order", MODELS["gpt2"], drop_table),
    "position_ids dropped": Fault("position_ids", MODELS["llama"], drop_position_ids),
    "positions restart with a cache": Fault("cache", MODELS["llama"], restart_at_0),
    "padding takes positions": Fault("padding", MODELS["opt"], count_slots),
    "padding is attended to": Fault("padding", MODELS["llama"], drop_mask),
    "tokenizer cuts": Fault("tokenizer", MODELS["llama"], cut_tokenizer),
    "tokenizer left at N": Fault("tokenizer", MODELS["llama_pi"], leave_tokenizer),
    "table shorter than the config": Fault("rows", MODELS["gpt2"], shorten_table),
    "positions in bf16 at 64k": Fault("collisions", long_llama, halve_positions),
    "linear bias in bf16": Fault("collisions", long_bloom, lambda model, _: model.to(torch.bfloat16)),
    "recorded, not in force": Fault("patch", MODELS["llama"], record_alone),
    "module replaced after the patch": Fault("patch", MODELS["llama_pi"], replace_module),
}
