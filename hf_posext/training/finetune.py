"""finetune: patch, train for a few hundred steps, and say what it gained, on the parts of transformers and PEFT."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainingArguments, set_seed
from transformers.trainer_utils import TrainOutput

from hf_posext.errors import PatchError
from hf_posext.evaluation.perplexity_report import PerplexityReport
from hf_posext.evaluation.pseudo_perplexity import is_masked_lm
from hf_posext.evaluation.scoring import check_causal
from hf_posext.gating import gate_adapter
from hf_posext.loading import ADAPTER_CONFIG
from hf_posext.methods.registry import get_method
from hf_posext.patching import patch_model, unpatch_model
from hf_posext.records import FILE_NAME, PatchRecord, record_of
from hf_posext.spans import length_of
from hf_posext.training.adapters import make_trainable, merged
from hf_posext.training.checkpoints import StopOnSignal, newest_checkpoint, settle
from hf_posext.training.checks import GradientCheck, check_patch
from hf_posext.training.config import FinetuneConfig
from hf_posext.training.data import REACHING, Rows, load_documents, training_rows
from hf_posext.training.loss import loss_without_logits
from hf_posext.training.measuring import Meter
from hf_posext.training.progress import ProgressLine, bars_of_datasets, is_watched
from hf_posext.training.reading import check_reading, first_position
from hf_posext.training.result import FinetuneResult
from hf_posext.training.trainer import PosextTrainer, training_arguments

REPORT = "report.json"
PLOT = "plot.png"
ADAPTER_FILES = (ADAPTER_CONFIG, "adapter_model.safetensors", FILE_NAME)


def finetune(
    model: nn.Module,
    tokenizer: Any,
    documents: Iterable[Any] | None,
    config: FinetuneConfig,
    *,
    evaluation_documents: Iterable[Any] | None = None,
    progress: bool | None = None,
) -> FinetuneResult:
    """Trains a patched model for a short while, so that it reads as well at the target length as it did at N.

    The patch comes first, so that what is learned is learned for it. Everything that was trained is saved in
    `output_dir`: an adapter with its `posext.json`, which `load_pretrained` reads, or with `merge` (and where every
    weight is trained) a checkpoint. The same call goes on where an earlier one was stopped or killed. Under
    `accelerate launch` every process calls it.

    Args:
        model: a causal or masked LM, patched or not; it is trained in place.
        tokenizer: its tokenizer; None where all documents are token ids.
        documents: training text as `perplexity` takes it; None to read `config.data.path`.
        config: of the run.
        evaluation_documents: held-out text to measure before and after; None to read `config.evaluation.path`.
        progress: a bar on stderr; None shows it in a terminal.

    Returns:
        The model with its adapter, what the run cost and what it gained.

    Raises:
        TypeError, ValueError: a bad argument, or a key of the config that is not allowed; nothing was changed.
        PatchError: no patch, or one that is not in force; the model is left as it was.
        TrainingError: a loss or a gradient that is not finite, a weight that does not learn, a checkpoint that cannot
            be written. The last good checkpoint stays.
    """
    arguments = training_arguments(config)
    is_masked = is_masked_lm(model)
    if not is_masked:
        check_causal(model)
    with ExitStack() as undo:
        undo.callback(set_trained, [(each, each.requires_grad) for each in model.parameters()])
        if record_of(model) is None:
            undo.callback(unpatch_model, model)
        apply_patch(model, tokenizer, config)
        check_patch(model, is_control=config.control_length is not None)
        run = Run.of(model, tokenizer, config, is_masked)
        with bars_of_datasets(are_shown=is_watched(progress)):
            rows = run.rows(model, load_documents(config.data) if documents is None else documents, arguments)
        meter = run.meter(evaluation_documents, progress)
        before = meter.before(model)
        trained: Any = make_trainable(model, config.adapter, run.record)
        if trained is not model:
            undo.callback(trained.unload)
        if run.is_gated:
            gate_adapter(trained)
        undo.pop_all()
    return run.train(trained, rows, arguments, meter, before)


def set_trained(flags: list[tuple[nn.Parameter, bool]]) -> None:
    """Says of parameters which are trained."""
    for parameter, flag in flags:
        parameter.requires_grad_(flag)


def apply_patch(model: nn.Module, tokenizer: Any, config: FinetuneConfig) -> None:
    """Patches the model as the config says, unless it is patched so already.

    Raises:
        PatchError: it is patched otherwise.
    """
    record = record_of(model)
    if config.patch is None:
        return
    if record is None:
        patch_model(model, tokenizer=tokenizer, **config.patch)
        return
    present = {"method": record.method, "factor": record.factor, "target_length": record.target_length}
    present |= {"dynamic": record.dynamic, "layers": record.layers, "scale": record.scale} | record.options
    named = config.patch | {"method": get_method(config.patch["method"]).name}
    if any(present.get(name, value) != value for name, value in named.items()):
        raise PatchError(
            f"The model is patched with {record.describe()}, and the config asks for {config.patch}. Unpatch it, or "
            "leave `patch` out of the config."
        )


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        tokenizer: of the model.
        config: of the run.
        record: of the patch, None for a control without one.
        trained_length: N in tokens.
        target_length: T in tokens.
        is_masked: whether the model is a masked LM.
    """

    tokenizer: Any
    config: FinetuneConfig
    record: PatchRecord | None
    trained_length: int
    target_length: int
    is_masked: bool

    @classmethod
    def of(cls, model: nn.Module, tokenizer: Any, config: FinetuneConfig, is_masked: bool) -> Run:
        """The run of a model that has its patch, or of a control."""
        record = record_of(model)
        if record is not None:
            return cls(tokenizer, config, record, record.steps()[0].trained_length, record.target_length, is_masked)
        target = config.control_length or 1
        return cls(tokenizer, config, None, length_of(model) or target, target, is_masked)

    @property
    def is_gated(self) -> bool:
        """Whether the adapter is off for text of at most N tokens."""
        adapter = self.config.adapter
        if adapter.only_beyond_trained_length is not None:
            return adapter.only_beyond_trained_length
        return self.record is not None and self.record.dynamic and adapter.train == "lora" and not adapter.merge

    def rows(self, model: nn.Module, documents: Iterable[Any], arguments: TrainingArguments) -> Rows:
        """What it reads.

        Raises:
            ValueError: short rows that nothing can be learned from, or rows that the model would not read as meant.
        """
        if self.is_gated and self.config.data.short_fraction:
            raise ValueError(
                "`data.short_fraction` cannot go with only_beyond_trained_length: text of at most N tokens is read "
                "without the adapter, so that nothing is learned from it. Leave one out."
            )
        data, batch = self.config.data, arguments.per_device_train_batch_size
        first = first_position(model) if data.positions in REACHING or data.packing else 0
        check_reading(model, data, batch_size=batch, target_length=self.target_length, first=first)
        return training_rows(
            documents,
            self.tokenizer,
            data,
            trained_length=self.trained_length,
            target_length=self.target_length,
            is_masked=self.is_masked,
            first_position=first,
        )

    def meter(self, documents: Iterable[Any] | None, progress: bool | None) -> Meter:
        """What measures it."""
        settings = self.config.evaluation
        if documents is None and settings.path is not None:
            documents = load_documents(settings)
        held_out = [] if documents is None else list(islice(documents, settings.max_documents))
        lengths = (self.trained_length, self.target_length)
        return Meter(self.tokenizer, held_out, settings, *lengths, self.is_masked, progress)

    def train(
        self, model: Any, rows: Rows, arguments: TrainingArguments, meter: Meter, before: PerplexityReport | None
    ) -> FinetuneResult:
        """Trains, saves and measures."""
        folder = Path(self.config.output_dir)
        checkpoint = newest_checkpoint(folder) if self.config.resume else None
        stop, line = StopOnSignal(), ProgressLine(meter.progress)
        set_seed(arguments.seed)
        if arguments.ddp_find_unused_parameters is None:  # where no token is beyond N the adapter is not used
            arguments.ddp_find_unused_parameters = self.is_gated
        with loss_without_logits(model, chunk=self.config.chunk):
            trainer = PosextTrainer(model, arguments, rows, self.tokenizer, meter, [stop, line, GradientCheck()])
            if trainer.is_world_process_zero():
                settle(folder, self.config.to_dict(), is_resumed=checkpoint is not None)
            trainer.accelerator.wait_for_everyone()
            try:
                output = trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
            finally:
                stop.release()
                line.stop()
        metrics = self.cost(trainer, output) | {"is_interrupted": stop.is_asked}
        return self.finish(trainer, meter, before, metrics)

    def cost(self, trainer: PosextTrainer, output: TrainOutput) -> dict[str, Any]:
        """Steps, seconds, tokens and what was trained, as `FinetuneResult.metrics`."""
        losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
        trained, whole = trainer.sizes
        return {
            "steps": trainer.state.global_step,
            "seconds": output.metrics["train_runtime"],
            "tokens": trainer.state.num_input_tokens_seen,
            "trainable": trained,
            "parameters": whole,
            "trainable_share": trained / whole,
            "loss": losses[-1] if losses else None,
        }

    def finish(
        self, trainer: PosextTrainer, meter: Meter, before: PerplexityReport | None, metrics: dict[str, Any]
    ) -> FinetuneResult:
        """Writes what was trained, measures it and writes the report; a run that was stopped has its checkpoint."""
        folder = Path(self.config.output_dir)
        model: Any = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False).eval()
        after = None
        if not metrics["is_interrupted"]:
            trainer.save_model()
            after = None if trainer.is_sharded else meter.after(model, before)
            if self.config.adapter.merge:
                model = merged(model)
        if after is not None:
            metrics |= meter.outcome(after)
        result = FinetuneResult(model, metrics, folder, trainer.state.log_history, after, self.config.to_dict())
        if trainer.is_world_process_zero() and not metrics["is_interrupted"]:
            if self.config.adapter.merge:
                write_merged(model, self.tokenizer, folder)
            result.to_json(folder / REPORT)
            result.plot(folder / PLOT)
        return result


def write_merged(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes a checkpoint with the adapter merged into the weights, in place of the adapter."""
    for name in ADAPTER_FILES:
        (folder / name).unlink(missing_ok=True)
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
