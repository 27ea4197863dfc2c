"""A model that would read rows otherwise than they are meant is found out before it is trained on them."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from hf_posext.training.config import DataConfig
from hf_posext.training.reading import check_reading, first_position
from tests.architectures import DECODER, tiny_model
from tests.evaluation import masked_stubs

PACKED = [{"packing": True}, {"short_fraction": 0.5}]
JUMPING = [{"positions": "pose"}, {"positions": "randomized"}]
DROPPED = ("num_key_value_heads", "head_dim", "attention_dropout")
OLD = {
    "gpt2": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 64},
    "bloom": {},
    "falcon": {"alibi": True},
}


def old_model(family: str) -> Any:
    """A tiny random model of a family that `tests/architectures.py` does not have."""
    settings = {name: value for name, value in DECODER.items() if name not in DROPPED}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **settings, **OLD[family])
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def check(model: nn.Module, batch_size: int = 2, **config: Any) -> None:
    """Checks the rows of a config with T = 32."""
    first = first_position(model)
    check_reading(model, DataConfig(**config), batch_size=batch_size, target_length=32, first=first)


@pytest.mark.parametrize("config", [*PACKED, *JUMPING, {}, {"positions": "random_length", "short_fraction": 0.5}])
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gemma3", "gptj"])
def test_models_that_read_rows_as_they_are_meant_pass(name: str, config: dict[str, Any]) -> None:
    check(tiny_model(name), **config)


@pytest.mark.parametrize("family", ["opt", "bloom"])
@pytest.mark.parametrize("config", PACKED)
def test_a_model_in_which_packed_documents_see_each_other_is_refused(family: str, config: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"lets the documents of a row see each other in batches of 2 with (sdpa|eager)"
    ):
        check(old_model(family), **config)


@pytest.mark.parametrize("family", ["bloom", "falcon"])
@pytest.mark.parametrize("config", JUMPING)
def test_a_model_that_takes_no_positions_is_refused(family: str, config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"does not read the positions that it is given, so `data.positions: "):
        check(old_model(family), **config)


@pytest.mark.parametrize("config", JUMPING)
@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_a_learned_table_may_be_reached_into(family: str, config: dict[str, Any]) -> None:
    check(old_model(family), **config)


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_a_model_that_takes_jumps_for_documents_is_refused(batch_size: int) -> None:
    """As flash attention does in batches of one row: here the mask of ones is dropped on the way in."""
    model = tiny_model("llama")

    def drop(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {name: value for name, value in kwargs.items() if name != "attention_mask" or len(value) > 1}

    model.register_forward_pre_hook(drop, with_kwargs=True)
    if batch_size > 1:
        check(model, batch_size, positions="pose")
    else:
        with pytest.raises(ValueError, match=r"takes a jump between positions for a new document in batches of 1"):
            check(model, batch_size, positions="pose")


@pytest.mark.parametrize(
    ("family", "first"), [("bert", 0), ("roberta", 2), ("xlm-roberta", 2), ("electra", 0), ("modernbert", 0)]
)
def test_where_a_model_begins_to_count_is_found(family: str, first: int) -> None:
    assert first_position(masked_stubs.build(family)) == first


def test_a_model_is_left_in_the_mode_that_it_was_in() -> None:
    model = tiny_model("llama").train()
    model.model.layers[0].eval()
    check(model, packing=True)
    assert model.training
    assert not model.model.layers[0].mlp.training
