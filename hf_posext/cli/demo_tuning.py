"""The part of `posext demo` that tunes: position interpolation by 4, and a LoRA of two hundred steps on top of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posext.cli.words import verdict

if TYPE_CHECKING:
    from hf_posext.training.result import FinetuneResult

FACTOR = 4
QUERIES_AND_KEYS = {"llama": ["q_proj", "k_proj"], "gpt_neox": ["query_key_value"]}


def tune(model: Any, tokenizer: Any, documents: Sequence[str], out: Path) -> FinetuneResult:
    """Tunes a demo model on books of its own pre-training, with the settings of `recipes/configs/tiny.yaml`.

    Args:
        model: the model, not patched.
        tokenizer: its tokenizer.
        documents: held-out texts.
        out: folder of the adapter.
    """
    from hf_posext.demo import training_documents
    from hf_posext.training.config import FinetuneConfig
    from hf_posext.training.finetune import finetune

    trained = int(model.config.max_position_embeddings)
    config = FinetuneConfig.from_dict(
        {
            "output_dir": str(out),
            "patch": {"method": "pi", "factor": FACTOR},
            "data": {"seed": 17},
            "adapter": {
                "lora": {"r": 32, "lora_alpha": 64, "target_modules": QUERIES_AND_KEYS[model.config.model_type]},
                "norms": False,
                "embeddings": False,
            },
            "evaluation": {"context_lengths": [trained, 2 * trained, FACTOR * trained]},
            "training": {
                "per_device_train_batch_size": 2,
                "learning_rate": 5e-3,
                "lr_scheduler_type": "linear",
                "max_steps": 200,
                "save_strategy": "no",
                "use_cpu": True,
                "seed": 17,
            },
            "resume": False,
        }
    )
    return finetune(model, tokenizer, training_documents(), config, evaluation_documents=documents)


def read(result: FinetuneResult) -> list[str]:
    """What the numbers say, in sentences made from them."""
    gain, kept = result.metrics["gain"], result.metrics["retention"]
    return [
        f"Tuned: `pi` x{FACTOR}, LoRA for {result.metrics['steps']} steps in {result.metrics['seconds']:.0f} s on "
        f"{result.metrics['trainable_share']:.1%} as many numbers as the model has: {gain['after']:.1f} with "
        f"{gain['context_length']} tokens of context, {gain['before']:.1f} before. Against truncating the model as it "
        f"was given it is {verdict(gain['against_truncate'])}.",
        f"On short text, {kept['context_length']} tokens, the tuned model has {kept['after']:.1f} and the model as it "
        f"was given {kept['unpatched']:.1f}: {kept['ratio']:.3f} times as much (95 % {kept['low']:.3f} to "
        f"{kept['high']:.3f}).",
    ]
