"""What a process of a test does: run as a script, alone or under torchrun, it writes losses and weights to a file."""

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hf_posext import finetune, patch_model
from hf_posext.training import run
from hf_posext.training.adapters import make_trainable
from hf_posext.training.checks import GradientCheck
from hf_posext.training.config import AdapterConfig
from hf_posext.training.loss import loss_without_logits
from tests.training.runs import VOCABULARY, T, config, documents, tiny_llama

STEPS, ROWS = 4, 4


def whole(folder: Path, rows: int, patch: dict[str, Any]) -> dict[str, Any]:
    """A whole run, each process with its share of the rows of a step."""
    settings = config(
        folder / "run",
        patch=patch,
        training={"per_device_train_batch_size": rows},
        data={"positions": "random_length", "shortest": T // 2, "length": T},
    )
    result = finetune(tiny_llama(), None, documents(), settings, evaluation_documents=documents(4, seed=9))
    tuned = [row["nll"] for row in result.evaluation.rows if row["arm"].endswith("tuned")]
    return {"losses": losses_of(result.history), "tuned": tuned, "weights": trained_by(result.model)}


def stream(folder: Path, rows: int, patch: dict[str, Any]) -> dict[str, Any]:
    """A whole run on documents that are read meanwhile, some rows of which hold several short texts."""
    texts = Dataset.from_dict({"input_ids": documents(12)}).to_iterable_dataset()
    settings = config(
        folder / "run",
        patch=patch,
        training={"per_device_train_batch_size": rows},
        data={"short_fraction": 0.4, "seed": 5},
    )
    result = finetune(tiny_llama(), None, texts, settings)
    return {"losses": losses_of(result.history), "weights": trained_by(result.model)}


class AskedToStop(GradientCheck):
    """Sends SIGTERM to the last process alone, in its second step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called after every step."""
        if state.global_step == 2 and args.process_index == args.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def stop(folder: Path, rows: int, patch: dict[str, Any]) -> dict[str, Any]:
    """A whole run that is asked to stop, and goes on."""
    settings = config(folder / "run", patch=patch, training={"per_device_train_batch_size": rows})
    run.GradientCheck = AskedToStop
    stopped = finetune(tiny_llama(), None, documents(), settings)
    run.GradientCheck = GradientCheck
    assert stopped.metrics["is_interrupted"]
    assert stopped.metrics["steps"] == 3
    result = finetune(tiny_llama(), None, documents(), settings)
    return {"losses": losses_of(result.history), "weights": trained_by(result.model)}


def losses_of(history: list[dict[str, Any]]) -> list[float]:
    """One for each step."""
    return [each["loss"] for each in history if "loss" in each]


def trained_by(model: Any) -> dict[str, torch.Tensor]:
    """All that is trained, whole."""
    named = {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}
    return {name: (each.full_tensor() if isinstance(each, DTensor) else each).clone() for name, each in named.items()}


def shard(folder: Path, rows: int, patch: dict[str, Any]) -> dict[str, Any]:
    """A few steps without the Trainer, whose accelerate shards nothing on a CPU: FSDP2 where there are processes."""
    rank, processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = make_trainable(patch_model(tiny_llama(), **patch), AdapterConfig(norms=True, embeddings=True), None)
    losses = []
    with loss_without_logits(model, chunk=16):
        if processes > 1:
            for layer in model.get_base_model().model.layers:
                fully_shard(layer)
            fully_shard(model)
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
        for step in range(STEPS):
            ids = torch.randint(2, VOCABULARY, (ROWS, T), generator=torch.Generator().manual_seed(step))
            mine = ids[rank * ROWS // processes : (rank + 1) * ROWS // processes]
            # gradients are averaged over processes, so each loss is that of its own rows
            loss = model(input_ids=mine, labels=mine, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            if processes > 1:
                dist.all_reduce(total)
            losses.append(float(total) / processes)
    return {"losses": losses, "weights": trained_by(model)}


def main() -> None:
    """`process.py MODE OUT ROWS METHOD DYNAMIC`."""
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    mode, out, rows, method, dynamic = sys.argv[1:]
    if mode == "shard" and "RANK" in os.environ:
        dist.init_process_group("gloo")
    patch = {"method": method, "factor": 4, "dynamic": dynamic == "True"}
    found = {"run": whole, "stream": stream, "stop": stop, "shard": shard}[mode](Path(out), int(rows), patch)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(found, Path(out) / "found.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
