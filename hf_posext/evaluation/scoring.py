"""Scores the passes of a plan: one NLL per target, in fp32, with the model's head applied to a few rows at a time.

The logits of a long sequence are by far the largest tensor of an evaluation (32k tokens x 128k words: 17 GB in fp32),
and only those at scored positions are needed. So the model's own `forward` runs once per batch up to the hidden states,
and its head then sees `chunk` rows of them at a time. It is the model's own code that turns them into logits: soft
caps, logit scales and biases of the head are all kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from hf_posext.evaluation.forwards import (
    LengthError,
    causal_lm,
    evaluating,
    is_encoder_decoder,
    is_headless,
    logits_of,
    sees_ahead,
)
from hf_posext.evaluation.heads import find_backbone, rows_of, run_backbone, run_head
from hf_posext.evaluation.windows import Pass

NOT_CAUSAL = "Perplexity needs a causal LM head, where a token is predicted from those before it; {what}. {hint}"
HINT = "Load the model with AutoModelForCausalLM."
MASKED = "Measure a masked LM with `pseudo_perplexity`, and load any other model with AutoModelForCausalLM."


def score(
    model: nn.Module,
    windows: Sequence[Pass],
    *,
    batch_size: int = 1,
    chunk: int = 1024,
    progress: bool | None = None,
    description: str = "scoring",
) -> list[Tensor]:
    """Negative log-likelihood of every target of every window.

    Windows of equal length share a batch, so no row is ever padded and each is read exactly as it would be alone. With
    several processes (`accelerate launch`) each scores its share and all get the whole result.

    Args:
        model: a causal or masked LM, also wrapped by PEFT, DDP or `torch.compile`; its training flags are left as they
            were.
        windows: what to feed and what to score.
        batch_size: windows per forward pass.
        chunk: rows of hidden states that the head sees at a time.
        progress: a bar on stderr; None shows it where stderr is a terminal.
        description: words beside the bar.

    Returns:
        One tensor of NLL in nats per window, fp32 [targets] on the CPU, in the order of `windows`.

    Raises:
        LengthError: windows that are longer than the model can read; in all processes, if it is so in one.
    """
    network = causal_lm(model)
    rank, processes = _place()
    batches = _batches(windows, batch_size)
    scores: dict[int, Tensor] = {}
    failure: LengthError | None = None
    with evaluating(network), torch.no_grad(), _bar(progress if rank == 0 else False) as bar:
        backbone = find_backbone(network)
        try:
            for batch in bar.track(batches[rank::processes], description=description):
                found = _score_batch(network, backbone, [windows[index] for index in batch], chunk)
                scores.update(zip(batch, found, strict=True))
        except LengthError as error:
            failure = error  # the other processes wait for this one, so it must not leave before them
    if processes > 1:
        shares: list[Any] = [None] * processes
        dist.all_gather_object(shares, (scores, failure))
        scores = {index: nll for share, _ in shares for index, nll in share.items()}
        failure = next((other for _, other in shares if other is not None), None)
    if failure is not None:
        raise failure
    return [scores[index] for index in range(len(windows))]


def check_causal(model: nn.Module) -> None:
    """Refuses a model that has no LM head, or whose prediction of a token may look at that token.

    The second is measured, on two inputs of two tokens that differ in the last one.

    Raises:
        ValueError: says what is missing and how to load the model.
    """
    network = causal_lm(model)
    kind = type(network).__name__
    if is_encoder_decoder(network):
        raise ValueError(NOT_CAUSAL.format(what=f"{kind} is an encoder-decoder", hint="Decoder-only models have one."))
    if is_headless(network):
        raise ValueError(NOT_CAUSAL.format(what=f"{kind} has none", hint=HINT))
    if sees_ahead(network):
        raise ValueError(NOT_CAUSAL.format(what=f"{kind} looks at the following tokens too", hint=MASKED))


def _score_batch(network: nn.Module, backbone: nn.Module | None, batch: list[Pass], chunk: int) -> list[Tensor]:
    """NLL of windows of one length, fp32 [targets] each."""
    ids = torch.stack([window.fed for window in batch])  # [B, L]
    rows = torch.cat([window.rows + row * ids.shape[1] for row, window in enumerate(batch)])
    targets = torch.cat([window.targets for window in batch])
    pieces = []
    read = _reader(network, backbone, ids, rows)
    for start in range(0, len(rows), chunk):
        part = slice(start, start + chunk)
        logits = read(part).float()  # [<= chunk, V]; the loss of bf16 logits would itself be rounded to bf16
        pieces.append(nn.functional.cross_entropy(logits, targets[part].to(logits.device), reduction="none").cpu())
    return list(torch.cat(pieces).split([len(window.targets) for window in batch]))


def _reader(network: nn.Module, backbone: nn.Module | None, ids: Tensor, rows: Tensor) -> Callable[[slice], Tensor]:
    """A function from a slice of `rows` (indices into the flattened batch) to its logits [rows, V]."""
    if backbone is None:
        logits = logits_of(network, ids)
        logits = logits[rows.to(logits.device)]
        return lambda part: logits[part]
    outputs, _ = run_backbone(backbone, lambda: logits_of(network, ids))
    hidden = rows_of(outputs, rows)
    return lambda part: run_head(backbone, outputs, hidden[part], lambda: logits_of(network, ids))


def _batches(windows: Sequence[Pass], batch_size: int) -> list[list[int]]:
    """Indices of windows of equal length, at most `batch_size` together, longest first: what is too big fails early."""

    def length(index: int) -> int:
        return len(windows[index].fed)

    order = sorted(range(len(windows)), key=length, reverse=True)
    groups = [list(group) for _, group in groupby(order, key=length)]
    return [group[start : start + batch_size] for group in groups for start in range(0, len(group), batch_size)]


def _place() -> tuple[int, int]:
    """Rank of this process and number of processes; starts the group that `accelerate launch` has prepared."""
    if not dist.is_available():
        return 0, 1
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from accelerate import PartialState

        PartialState()
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _bar(progress: bool | None) -> Progress:
    """A progress bar on stderr that leaves nothing behind."""
    console = Console(stderr=True)
    shown = console.is_terminal if progress is None else progress
    return Progress(console=console, disable=not shown, transient=True)
