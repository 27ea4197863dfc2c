"""What a training step costs: PoSE rows of N tokens against whole windows of 4 N, and an adapter that is off up to N.

    python recipes/benchmarks/training_step.py --threads 1

Forward and backward of a LoRA on queries and keys, the same number of tokens in every arm: one window of 4 N tokens, or
four rows of N with skipped positions. `demo:llama` has N = 256; a random Llama of 9M parameters has N = 1024, where
attention weighs more. The adapter that is gated acts beyond N alone. About six minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from harness import arguments, compare, report
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import hf_posext
from hf_posext.demo import load_demo
from hf_posext.training.loss import loss_without_logits
from hf_posext.training.positions import generator_of, pose_positions

FACTOR = 4


def random_llama() -> LlamaForCausalLM:
    """A Llama of 9M parameters that could have been trained at 1024 tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=704, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=1024,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def adapted(model: LlamaForCausalLM, *, dynamic: bool = False, is_gated: bool = False) -> Any:
    """The model with yarn and a LoRA."""
    hf_posext.patch_model(model, "yarn", FACTOR, dynamic=dynamic)
    wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "k_proj"]))
    return hf_posext.gate_adapter(wrapped) if is_gated else wrapped


def step(model: Any, batch: dict[str, torch.Tensor]) -> Callable[[], Any]:
    """One forward and backward."""
    return lambda: model(**batch, labels=batch["input_ids"], use_cache=False).loss.backward()


def whole(length: int) -> dict[str, torch.Tensor]:
    """One window of T tokens."""
    return {"input_ids": torch.randint(2, 1000, (1, length))}


def skipped(length: int) -> dict[str, torch.Tensor]:
    """As many tokens in rows of N, whose positions reach up to T."""
    rows = [
        torch.as_tensor(pose_positions(length // FACTOR, length, chunks=2, generator=generator_of(0, "positions", row)))
        for row in range(FACTOR)
    ]
    ids = torch.randint(2, 1000, (FACTOR, length // FACTOR))
    return {"input_ids": ids, "position_ids": torch.stack(rows), "attention_mask": torch.ones_like(ids)}


def main() -> None:
    """Times the arms and prints the ratios."""
    options = arguments(__doc__ or "")
    rows = []
    for name, make in {"demo:llama": lambda: load_demo("llama")[0], "9M": random_llama}.items():
        target = FACTOR * make().config.max_position_embeddings
        static, dynamic = adapted(make()), adapted(make(), dynamic=True)
        gated = adapted(make(), dynamic=True, is_gated=True)
        with loss_without_logits(static), loss_without_logits(dynamic), loss_without_logits(gated):
            arms = {
                "whole": step(static, whole(target)),
                "pose": step(static, skipped(target)),
                "dynamic": step(dynamic, whole(target)),
                "gated": step(gated, whole(target)),
            }
            seconds = compare(arms, rounds=9)
        rows.append({"what": f"{name}: pose / whole windows", "ratio": seconds["pose"] / seconds["whole"]})
        rows.append({"what": f"{name}: dynamic / static", "ratio": seconds["dynamic"] / seconds["whole"]})
        rows.append({"what": f"{name}: gated / not gated", "ratio": seconds["gated"] / seconds["dynamic"]})
        rows.append({"what": f"{name}: milliseconds of a step on whole windows", "ratio": 1000 * seconds["whole"]})
    report("training_step", rows, options.out)


if __name__ == "__main__":
    main()
