"""finetune: patch, train for a few hundred steps, and say what it gained, on the parts of transformers and PEFT."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from torch import nn
from transformers import set_seed

from hf_posext.errors import PatchError
from hf_posext.evaluation.forwards import causal_lm
from hf_posext.evaluation.pseudo_perplexity import is_masked_lm
from hf_posext.evaluation.scoring import check_causal
from hf_posext.gating import gate_adapter
from hf_posext.methods.registry import get_method
from hf_posext.patching import patch_model, unpatch_model
from hf_posext.records import record_of
from hf_posext.training.adapters import make_trainable
from hf_posext.training.checks import check_patch
from hf_posext.training.config import FinetuneConfig
from hf_posext.training.loss import check_head
from hf_posext.training.progress import bars_of_datasets, is_watched
from hf_posext.training.result import FinetuneResult
from hf_posext.training.run import Run
from hf_posext.training.sources import load_documents
from hf_posext.training.trainer import is_sharded, training_arguments


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
        progress: a bar on stderr, or lines where it is no terminal; False for neither.

    Returns:
        The model with its adapter, what the run cost and what it gained.

    Raises:
        TypeError, ValueError: a bad argument, or a key of the config that is not allowed; nothing was changed.
        PatchError: no patch, or one that is not in force; the model is left as it was.
        TrainingError: a loss or a gradient that is not finite, a weight that does not learn, a checkpoint that cannot
            be written. The last good checkpoint stays.
    """
    arguments = training_arguments(config)
    network = causal_lm(model)
    check_head(network)
    is_masked = is_masked_lm(model)
    if not is_masked:
        check_causal(model)
    if arguments.place_model_on_device and not is_sharded(arguments) and not hasattr(network, "hf_device_map"):
        model.to(arguments.device)  # so that before and after are measured on one device
    set_seed(arguments.seed)  # of the adapter that begins
    with ExitStack() as undo:
        undo.callback(set_trained, [(each, each.requires_grad) for each in model.parameters()])
        if record_of(model) is None:
            undo.callback(unpatch_model, model)
        apply_patch(model, tokenizer, config)
        check_patch(model, is_control=config.control_length is not None)
        with bars_of_datasets(are_shown=is_watched(progress)):
            text = load_documents(config.data) if documents is None else documents
            run = Run.of(model, tokenizer, text, evaluation_documents, config, arguments, progress, is_masked=is_masked)
        before = run.before(model)
        trained: Any = make_trainable(model, config.adapter, run.record)
        if trained is not model:
            undo.callback(trained.unload)
        if run.is_gated:
            gate_adapter(trained)
        undo.pop_all()
    return run.train(trained, before)


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
    method = get_method(config.patch["method"])
    asked = {"layers": "full", "scale": "live", **config.patch, "method": method.name}
    options = {name: asked.pop(name) for name in [*asked] if name in method.all_options()}
    if not method.follows_length(options):
        asked.setdefault("dynamic", False)
    present = record.to_dict()
    if options != record.options or any(present.get(name) != value for name, value in asked.items()):
        raise PatchError(
            f"The model is patched with {record.describe()} and the options {record.options}, and the config asks for "
            f"{config.patch}. Unpatch it, or leave `patch` out of the config."
        )
