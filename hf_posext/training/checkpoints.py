"""What a run leaves on the disk: checkpoints that are whole or do not count, and the patch beside every adapter."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_posext.attention.reading import own_parameters
from hf_posext.mechanisms import root_model
from hf_posext.records import OWN_WEIGHTS, record_of, write_record
from hf_posext.reports import write_atomically
from hf_posext.training.config import FinetuneConfig
from hf_posext.training.data import Rows

SETTINGS = "finetune.json"
SAMPLED = 64  # numbers of each weight in the digest of a model


def write_patch(model: nn.Module, folder: Path) -> None:
    """Writes beside an adapter what its own files do not know: the record of the patch, and what was trained of it.

    Args:
        model: the model with adapter and patch; nothing is written for one that is not patched.
        folder: of the adapter.
    """
    if record_of(model) is None:
        return
    write_record(model, folder)
    names = {id(module): name for name, module in root_model(model).named_modules()}
    own = {f"{names[id(module)]}.{name}": parameter for module, name, parameter in own_parameters(model)}
    if own:
        save_file({name: parameter.detach().contiguous() for name, parameter in own.items()}, folder / OWN_WEIGHTS)


def newest_checkpoint(output_dir: Path, settings: dict[str, Any] | None = None) -> Path | None:
    """The newest checkpoint that was written to the end, None without one.

    The state of the trainer is the last file of a checkpoint, so a run that was killed while it wrote left none.

    Args:
        output_dir: of the run.
        settings: those that the run must have been begun with; None to ask nothing.

    Raises:
        ValueError: it was begun with others, with the keys that differ.
    """
    newest = newest_complete(output_dir)
    path = output_dir / SETTINGS
    if newest is not None and settings is not None and path.is_file():
        changed = differences(json.loads(path.read_text(encoding="utf-8")), json.loads(json.dumps(settings)))
        if changed:
            raise ValueError(
                f"{str(output_dir)!r} holds a run with another `{'`, `'.join(changed)}`. Choose another `output_dir`, "
                "or begin anew with `resume: false`, which deletes its checkpoints."
            )
    return newest


def newest_complete(output_dir: Path) -> Path | None:
    """As `newest_checkpoint`, whatever the run."""
    found = {}
    for folder in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        step = folder.name.rpartition("-")[2]
        if step.isdigit() and is_complete(folder):
            found[int(step)] = folder
    return found[max(found)] if found else None


def is_complete(folder: Path) -> bool:
    """Whether the last file of a checkpoint is there and whole."""
    try:
        json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def clear(output_dir: Path, *, keep_complete: bool) -> None:
    """Deletes checkpoints that a run cannot go on from: those that were not written to the end, or all."""
    for folder in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        if not (keep_complete and is_complete(folder)):
            shutil.rmtree(folder, ignore_errors=True)


def settings_of(model: nn.Module, rows: Rows, config: FinetuneConfig) -> dict[str, Any]:
    """What decides the weights that a run ends with, as plain data: its config, digests of its model and its rows."""
    whole = config.to_dict()
    decisive = {name: value for name, value in whole.items() if name not in ("resume", "evaluation", "output_dir")}
    heads = [each.detach().flatten()[:SAMPLED].double().cpu() for each in model.parameters()]
    weights = hashlib.sha256(torch.cat(heads).numpy().tobytes()).hexdigest()
    counts = (rows.documents, rows.windows, rows.tokens, rows.dropped_tokens)
    ends = [rows.dataset[index]["input_ids"] for index in (0, rows.windows - 1)] if rows.windows else []
    text = hashlib.sha256(json.dumps([counts, ends]).encode()).hexdigest()
    return {**decisive, "digest of the model": weights, "digest of the text": text}


def note_settings(output_dir: Path, settings: dict[str, Any]) -> None:
    """Writes the settings of a run into its folder."""
    output_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(output_dir / SETTINGS, json.dumps(settings, indent=2) + "\n")


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Dotted keys at which two pieces of plain data differ."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return [] if one == other else [where]
    keys = sorted({*one, *other})
    return [each for key in keys for each in differences(one.get(key), other.get(key), f"{where}.{key}".lstrip("."))]


class StopOnSignal(TrainerCallback):
    """Ends a run at the next step after SIGTERM, with a checkpoint to go on from.

    Attributes:
        is_asked: whether the signal has come.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self.before: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Listens; only the main thread of a process may."""
        if threading.current_thread() is threading.main_thread():
            self.before = signal.signal(signal.SIGTERM, self.note)

    def note(self, number: int, frame: FrameType | None) -> None:
        """Called by the signal."""
        self.is_asked = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Asks for a checkpoint and the end, in all processes at the same step."""
        if args.world_size > 1:
            asked = torch.tensor(int(self.is_asked), device=args.device)
            dist.all_reduce(asked, op=dist.ReduceOp.MAX)
            self.is_asked = bool(asked)
        if self.is_asked:
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Gives the signal back."""
        self.release()

    def release(self) -> None:
        """Gives the signal back, also after an error."""
        if self.before is not None:
            signal.signal(signal.SIGTERM, self.before)
            self.before = None
