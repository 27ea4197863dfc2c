"""A bar on stderr with the loss beside it, or log lines where nobody watches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback


def is_watched(is_shown: bool | None) -> bool:
    """Whether there are bars; None asks whether stderr is a terminal."""
    return Console(stderr=True).is_terminal if is_shown is None else is_shown


@contextmanager
def bars_of_datasets(*, are_shown: bool) -> Iterator[None]:
    """The bars of `datasets` as they were, or none, for the length of a block."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    is_changed = not are_shown and not are_progress_bars_disabled()
    if is_changed:
        disable_progress_bars()
    try:
        yield
    finally:
        if is_changed:
            enable_progress_bars()


class ProgressLine(TrainerCallback):
    """Shows how far a run is.

    Args:
        is_shown: whether there is a bar; None shows it where stderr is a terminal, and lines where it is none.
    """

    def __init__(self, is_shown: bool | None) -> None:
        columns = (TextColumn("tuning"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[numbers]}"))
        self.bar = Progress(
            *columns,
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not is_watched(is_shown),
            transient=True,
        )
        self.has_lines = is_shown is None and not is_watched(None)
        self.task: TaskID | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins where the run begins, which is not at 0 where it goes on."""
        if state.is_world_process_zero:
            self.bar.start()
            self.task = self.bar.add_task("", total=state.max_steps, completed=state.global_step, numbers="")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """One step more; a checkpoint has the losses before it, so that a run that goes on has the same curve."""
        control.should_log = control.should_log or control.should_save
        if self.task is not None:
            self.bar.update(self.task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """The newest numbers."""
        if self.task is None or not logs or "train_runtime" in logs:
            return
        numbers = "  ".join(f"{name} {logs[name]:.4g}" for name in logs if name == "loss" or name.startswith("eval_"))
        if numbers:
            self.bar.update(self.task, numbers=numbers)
            if self.has_lines:
                self.bar.console.print(f"step {state.global_step} of {state.max_steps}: {numbers}", highlight=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Takes the bar away."""
        self.stop()

    def stop(self) -> None:
        """Takes the bar away, also after an error."""
        self.bar.stop()
        self.task = None
