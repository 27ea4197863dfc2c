"""One run: what it reads, what measures it, and the Trainer from the step where it begins or goes on to its report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainingArguments, set_seed

from hf_posext.attention.reading import own_parameters
from hf_posext.evaluation.perplexity_report import PerplexityReport
from hf_posext.loading import ADAPTER_CONFIG
from hf_posext.records import FILE_NAME, OWN_WEIGHTS, PatchRecord, record_of
from hf_posext.spans import length_of
from hf_posext.training.adapters import in_full_precision, merged
from hf_posext.training.checkpoints import StopOnSignal, clear, newest_checkpoint, note_settings, settings_of
from hf_posext.training.checks import GradientCheck
from hf_posext.training.config import FinetuneConfig
from hf_posext.training.data import Rows, training_rows
from hf_posext.training.loss import loss_without_logits
from hf_posext.training.measuring import Meter
from hf_posext.training.progress import ProgressLine
from hf_posext.training.reading import check_reading, first_position
from hf_posext.training.result import FinetuneResult
from hf_posext.training.sources import load_documents
from hf_posext.training.trainer import PosextTrainer, is_sharded

REPORT = "report.json"
PLOT = "plot.png"
ADAPTER_FILES = (ADAPTER_CONFIG, "adapter_model.safetensors", FILE_NAME, OWN_WEIGHTS)


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        config: of the run.
        arguments: of the Trainer.
        record: of the patch, None for a control without one.
        is_gated: whether the adapter is off for text of at most N tokens.
        rows: what it reads.
        meter: measures it.
        settings: what a run that goes on must have in common with the one that began.
        tokenizer: saved with what was trained.
    """

    config: FinetuneConfig
    arguments: TrainingArguments
    record: PatchRecord | None
    is_gated: bool
    rows: Rows
    meter: Meter
    settings: dict[str, Any]
    tokenizer: Any

    @classmethod
    def of(
        cls,
        model: nn.Module,
        tokenizer: Any,
        documents: Iterable[Any],
        held_out: Iterable[Any] | None,
        config: FinetuneConfig,
        arguments: TrainingArguments,
        progress: bool | None,
        *,
        is_masked: bool,
    ) -> Run:
        """The run of a model that has its patch, or of a control.

        Raises:
            ValueError: what cannot go together, rows that the model would not read as meant, or a folder with another
                run.
        """
        record = record_of(model)
        gated = is_gated(config, record)
        check_together(model, config, arguments, gated=gated)
        target = record.target_length if record else config.control_length or 1
        trained = record.steps()[0].trained_length if record else length_of(model) or target
        data = config.data
        positioned = data.positions in ("pose", "randomized") or data.packing or data.short_fraction
        first = first_position(model) if positioned else 0
        check_reading(model, data, batch_size=arguments.per_device_train_batch_size, target_length=target, first=first)
        rows = training_rows(
            documents,
            tokenizer,
            data,
            trained_length=trained,
            target_length=target,
            is_masked=is_masked,
            first_position=first,
        )
        if held_out is None and config.evaluation.path is not None:
            held_out = load_documents(config.evaluation)
        kept = [] if held_out is None else list(islice(held_out, config.evaluation.max_documents))
        meter = Meter(tokenizer, kept, config.evaluation, trained, target, is_masked, progress)
        settings = settings_of(model, rows, config)
        if config.resume:
            newest_checkpoint(Path(config.output_dir), settings)
        return cls(config, arguments, record, gated, rows, meter, settings, tokenizer)

    def before(self, model: nn.Module) -> PerplexityReport | None:
        """The model as it is before it is trained; nothing where no process will hold it whole."""
        return None if is_sharded(self.arguments) else self.meter.before(model)

    def train(self, model: Any, before: PerplexityReport | None) -> FinetuneResult:
        """Trains, saves and measures."""
        folder = Path(self.config.output_dir)
        checkpoint = newest_checkpoint(folder, self.settings) if self.config.resume else None
        stop, line = StopOnSignal(), ProgressLine(self.meter.progress)
        if self.arguments.ddp_find_unused_parameters is None:  # where no token is beyond N the adapter is not used
            self.arguments.ddp_find_unused_parameters = self.is_gated
        set_seed(self.arguments.seed)
        is_autocast = self.arguments.bf16 or self.arguments.fp16
        with loss_without_logits(model, chunk=self.config.chunk), in_full_precision(model, is_autocast=is_autocast):
            callbacks = [stop, line, GradientCheck()]
            trainer = PosextTrainer(model, self.arguments, self.rows, self.tokenizer, self.meter, callbacks)
            if trainer.is_world_process_zero():
                clear(folder, keep_complete=self.config.resume)
                note_settings(folder, self.settings)
            trainer.accelerator.wait_for_everyone()
            try:
                seconds = trainer.go_on(checkpoint)
            finally:
                stop.release()
                line.stop()
        metrics = cost(trainer) | {"seconds": seconds, "is_interrupted": stop.is_asked and not trainer.is_done}
        return self.finish(trainer, before, metrics)

    def finish(
        self, trainer: PosextTrainer, before: PerplexityReport | None, metrics: dict[str, Any]
    ) -> FinetuneResult:
        """Writes what was trained, measures it and writes the report; a run that was stopped has its checkpoint."""
        folder = Path(self.config.output_dir)
        model: Any = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False).eval()
        after = None
        if not metrics["is_interrupted"]:
            trainer.save_model()
            after = self.meter.after(model, before)
            if self.config.adapter.merge:
                model = merged(model)
        if after is not None:
            metrics |= self.meter.outcome(after)
        result = FinetuneResult(model, metrics, folder, trainer.state.log_history, after, self.config.to_dict())
        if trainer.is_world_process_zero() and not metrics["is_interrupted"]:
            if self.config.adapter.merge:
                write_merged(model, self.tokenizer, folder)
            result.to_json(folder / REPORT)
            result.plot(folder / PLOT)
        return result


def is_gated(config: FinetuneConfig, record: PatchRecord | None) -> bool:
    """Whether the adapter of a run is off up to N tokens: as the config says, else where the patch is dynamic."""
    asked = config.adapter.only_beyond_trained_length
    return record is not None and record.dynamic and config.adapter.train == "lora" if asked is None else asked


def check_together(model: nn.Module, config: FinetuneConfig, arguments: TrainingArguments, *, gated: bool) -> None:
    """Refuses what cannot go together.

    Raises:
        ValueError: names both.
    """
    if gated and config.data.short_fraction:
        raise ValueError(
            "`data.short_fraction` cannot go with only_beyond_trained_length: text of at most N tokens is read "
            "without the adapter, so that nothing is learned from it. Leave one out."
        )
    if gated and config.adapter.merge:
        raise ValueError(
            "`adapter.merge` cannot go with an adapter that is off for text of at most N tokens, as it is with a "
            "dynamic patch. Set `adapter.only_beyond_trained_length: false`, or do not merge."
        )
    if config.adapter.merge and is_sharded(arguments):
        raise ValueError("`adapter.merge` cannot go with FSDP or DeepSpeed. Merge what was saved, in one process.")
    if own_parameters(model) and is_sharded(arguments):
        raise ValueError(
            "Slopes and biases that a patch has made parameters cannot be trained with FSDP or DeepSpeed: one process "
            "would save its part of them. Train without, or patch without `learned`."
        )


def cost(trainer: PosextTrainer) -> dict[str, Any]:
    """Steps, tokens and what was trained, as `FinetuneResult.metrics`."""
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    trained, whole = trainer.sizes
    return {
        "steps": trainer.state.global_step,
        "tokens": trainer.state.num_input_tokens_seen,
        "trainable": trained,
        "parameters": whole,
        "trainable_share": trained / whole,
        "loss": losses[-1] if losses else None,
    }


def write_merged(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes a checkpoint with the adapter merged into the weights, in place of the adapter."""
    for name in ADAPTER_FILES:
        (folder / name).unlink(missing_ok=True)
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
