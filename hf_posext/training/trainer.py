"""transformers' Trainer, told what it cannot know: that the loss is weighted by tokens, and when a run cannot go on."""

from __future__ import annotations

import os
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_posext.errors import TrainingError
from hf_posext.loading import load_trained
from hf_posext.training.adapters import count_trainable
from hf_posext.training.checkpoints import newest_checkpoint, write_patch
from hf_posext.training.config import FinetuneConfig
from hf_posext.training.data import Rows
from hf_posext.training.measuring import Meter

DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 1,
    "learning_rate": 2e-4,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 20,
    "weight_decay": 0.0,
    "adam_beta2": 0.95,
    "max_steps": 200,
    "logging_steps": 10,
    "save_steps": 100,
    "save_total_limit": 2,
    "report_to": "none",
    "accelerator_config": {"dispatch_batches": False},  # else rank 0 joins batches that need not have the same columns
    "include_num_input_tokens_seen": "all",
}
FIXED: dict[str, Any] = {
    "prediction_loss_only": True,
    "remove_unused_columns": False,
    "logging_nan_inf_filter": False,
    "disable_tqdm": True,
    "average_tokens_across_devices": True,
    "label_smoothing_factor": 0.0,
}
"""What a run relies on; a config that says otherwise is refused."""
SHARDING = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")  # what `accelerate launch` sets
WRITERS = ("PytorchStreamWriter", "inline_container", "iostream")  # in the words of torch.save for a full disk
CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")  # the newer word first


def training_arguments(config: FinetuneConfig) -> TrainingArguments:
    """The arguments of the Trainer.

    Raises:
        ValueError: a key that `TrainingArguments` does not know, or one that a run relies on.
    """
    known = {each.name for each in fields(TrainingArguments)}
    given = dict(config.training)
    clash = [name for name, value in FIXED.items() if given.get(name, value) != value]
    if clash:
        raise ValueError(
            f"`training.{clash[0]}` must be {FIXED[clash[0]]!r} here, got {given[clash[0]]!r}. Leave it out."
        )
    word = next(name for name in CHECKPOINTING if name in known)
    given = {name.replace(CHECKPOINTING[1], word): value for name, value in given.items()}
    reentrant = given.setdefault(f"{word}_kwargs", {"use_reentrant": False})
    if reentrant.setdefault("use_reentrant", False):
        raise ValueError(
            "`training` asks for reentrant checkpointing, under which an adapter learns nothing. Leave it out."
        )
    if config.evaluation.every is not None:
        given |= {"eval_strategy": "steps", "eval_steps": config.evaluation.every}
    given.setdefault("dataloader_pin_memory", torch.accelerator.is_available())  # else it warns
    if "perplexity" in str(given.get("metric_for_best_model")):
        given.setdefault("greater_is_better", False)
    if "num_train_epochs" in given:
        given.setdefault("max_steps", -1)
    try:
        return TrainingArguments(output_dir=config.output_dir, **DEFAULTS | given | FIXED)
    except TypeError as error:
        raise ValueError(f"`training` is handed to transformers.TrainingArguments, which says: {error}.") from error


def is_sharded(arguments: TrainingArguments) -> bool:
    """Whether no process will hold the whole model, with FSDP or DeepSpeed."""
    by_launcher = any(os.environ.get(name, "false").lower() == "true" for name in SHARDING)
    return by_launcher or bool(arguments.fsdp) or bool(arguments.deepspeed)


class PosextTrainer(Trainer):
    """A Trainer whose model gives its loss itself, the mean over the tokens of a whole step.

    Args:
        model: the model, which takes `labels` and `num_items_in_batch`.
        args: its arguments.
        rows: what it reads.
        tokenizer: saved with every checkpoint; None for none.
        meter: measures it meanwhile.
        callbacks: called by the way.

    Attributes:
        sizes: numbers that are trained, and all numbers.
        folder: of the run.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        rows: Rows,
        tokenizer: Any,
        meter: Meter,
        callbacks: list[TrainerCallback],
    ) -> None:
        super().__init__(
            model=model,
            args=args,
            train_dataset=rows.dataset,
            eval_dataset=meter.documents or None,
            data_collator=rows.collate,
            processing_class=tokenizer,
            callbacks=callbacks,
        )
        self.meter = meter
        self.folder = Path(str(args.output_dir))
        self.sizes = count_trainable(model)
        self.model_accepts_loss_kwargs = True
        for own in (PrinterCallback, ProgressCallback):
            self.remove_callback(own)

    @property
    def is_done(self) -> bool:
        """Whether no step is left."""
        return self.state.global_step >= self.state.max_steps > 0

    def go_on(self, checkpoint: Path | None) -> float:
        """Trains from a checkpoint, or from the beginning; one at the end of its run is only loaded.

        Returns:
            Seconds that it took.
        """
        if checkpoint is not None:
            state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
            if state.global_step >= self.args.max_steps > 0:
                self._load_from_checkpoint(str(checkpoint))
                self.state = state
                return 0.0
        output = self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        return output.metrics["train_runtime"]

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Perplexity of the end of T tokens, in place of a loss over batches."""
        metrics = {}
        if not is_sharded(self.args):
            with self.accelerator.autocast():  # what is trained is in fp32 now, whatever the rest is in
                metrics = self.meter.meanwhile(self.accelerator.unwrap_model(self.model))
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """One forward and backward.

        Raises:
            TrainingError: the loss is not finite; the weights are still those of the last step.
        """
        loss = super().training_step(*args, **kwargs)
        if not torch.isfinite(loss):
            raise TrainingError(
                f"The loss is {float(loss)} in step {self.state.global_step + 1}. {self.way_back()} Lower "
                "`training.learning_rate`, or train in bf16 or fp32 instead of fp16."
            )
        return loss

    def way_back(self) -> str:
        """Which checkpoint is left, in a sentence."""
        newest = newest_checkpoint(self.folder)
        return f"The last good checkpoint is {str(newest)!r}." if newest else "No checkpoint was written before."

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """As `Trainer._load_from_checkpoint`, with what was trained of the patch beside an adapter."""
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        load_trained(self.accelerator.unwrap_model(model or self.model), Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        """As `Trainer._load_best_model`, with what was trained of the patch beside an adapter."""
        super()._load_best_model()
        load_trained(self.accelerator.unwrap_model(self.model), Path(str(self.state.best_model_checkpoint)))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """As `Trainer._save`, with the patch beside the weights."""
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            write_patch(self.accelerator.unwrap_model(self.model), Path(output_dir or self.folder))

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """As `Trainer._save_checkpoint`; a checkpoint that cannot be written does not stay.

        Raises:
            TrainingError: with the reason, such as a full disk.
        """
        try:
            super()._save_checkpoint(*args, **kwargs)
        except (OSError, SafetensorError, RuntimeError) as error:
            if type(error) is RuntimeError and not any(word in str(error) for word in WRITERS):
                raise
            folder = self.folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            shutil.rmtree(folder, ignore_errors=True)
            reason = " ".join(str(error).split()).rstrip(".")
            raise TrainingError(
                f"{str(folder)!r} cannot be written: {reason}. {self.way_back()} Make room, and start the run again."
            ) from error
