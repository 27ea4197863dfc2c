"""What a run leaves on the disk: checkpoints that are whole or do not count, and the patch beside every adapter."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from safetensors.torch import save_file
from torch import nn
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_posext.attention.reading import own_parameters
from hf_posext.mechanisms import root_model
from hf_posext.records import OWN_WEIGHTS, record_of, write_record

SETTINGS = "finetune.json"


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


def newest_checkpoint(output_dir: Path) -> Path | None:
    """The newest checkpoint that was written to the end, None without one.

    The state of the trainer is the last file of a checkpoint, so a run that was killed while it wrote left none.
    """
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


def drop_unfinished(output_dir: Path) -> None:
    """Deletes checkpoints that were not written to the end: nothing can go on from them."""
    for folder in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        if not is_complete(folder):
            shutil.rmtree(folder, ignore_errors=True)


def settle(output_dir: Path, settings: dict[str, Any], is_resumed: bool) -> None:
    """Notes the settings of a run in its folder; a run that goes on must have those that it began with.

    Args:
        output_dir: of the run.
        settings: as plain data.
        is_resumed: whether a checkpoint is there to go on from.

    Raises:
        ValueError: others, with the keys that differ.
    """
    path = output_dir / SETTINGS
    if is_resumed and path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        changed = sorted(differences(before, json.loads(json.dumps(settings))))
        if changed:
            raise ValueError(
                f"{str(output_dir)!r} holds a run with another `{'`, `'.join(changed)}`. Choose another `output_dir`, "
                "or begin anew with `resume: false`."
            )
    output_dir.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


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
        """Asks for a checkpoint and the end."""
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
