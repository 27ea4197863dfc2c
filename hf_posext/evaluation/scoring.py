"""Scores the passes of a plan: one NLL per target, in fp32, with the model's head applied to a few rows at a time.

The logits of a long sequence are by far the largest tensor of an evaluation (32k tokens x 128k words: 17 GB in fp32),
and only those at scored positions are needed. So the model's own `forward` runs once per batch up to the hidden states,
and its head then sees `chunk` rows of them at a time. It is the model's own code that turns them into logits: soft
caps, logit scales and biases of the head are all kept.

Passes of the same tokens are one run. Where a text is read in blocks with a cache, a pass is also read from another
that begins with its tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from transformers import DynamicCache

from hf_posext.evaluation.arms import vocabulary
from hf_posext.evaluation.forwards import (
    LengthError,
    cache_argument,
    causal_lm,
    evaluating,
    is_encoder_decoder,
    is_headless,
    logits_of,
    sees_ahead,
)
from hf_posext.evaluation.heads import find_backbone, rows_of, run_backbone, run_head
from hf_posext.evaluation.sharing import Run, follows_length, shared
from hf_posext.evaluation.windows import Pass

NOT_CAUSAL = "A causal LM head is needed, where a token is predicted from those before it; {what}. {hint}"
LOGITS = 2**23  # numbers in the logits that the head makes at a time, 32 MB in fp32, however large the vocabulary
BLOCK = 4  # tokens at a time, at most, of the trial that blocks are
EXACT, COARSE = 1e-3, 0.1  # what rounding may do to logits in that trial, in fp32 and in half precision
HINT = "Load the model with AutoModelForCausalLM."
MASKED = "Measure a masked LM with `pseudo_perplexity`, and load any other model with AutoModelForCausalLM."


def score(
    model: nn.Module,
    windows: Sequence[Pass],
    *,
    batch_size: int = 1,
    chunk: int = 1024,
    prefill_chunk_size: int | None = None,
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
        chunk: rows of hidden states that the head sees at a time, fewer where the vocabulary is large (`LOGITS`).
        prefill_chunk_size: tokens fed at a time, with a cache of those before, from which windows that begin alike are
            read too; equal to rounding. None feeds all at once.
        progress: a bar on stderr; None shows it where stderr is a terminal.
        description: words beside the bar.

    Returns:
        One tensor of NLL in nats per window, fp32 [targets] on the CPU, in the order of `windows`.

    Raises:
        LengthError: windows that are longer than the model can read; in all processes, if it is so in one.
        ValueError: a `prefill_chunk_size` for a model that cannot be read in blocks.
    """
    network = causal_lm(model)
    if prefill_chunk_size is not None:
        check_blocks(network, prefill_chunk_size)
    rank, processes = _place()
    scores: dict[int, Tensor] = {}
    failure: LengthError | None = None
    with evaluating(network), torch.no_grad(), _bar(progress if rank == 0 else False) as bar:
        batches = _batches(shared(windows, beginnings=prefill_chunk_size is not None), batch_size)
        backbone = find_backbone(network)
        rows = min(chunk, max(1, LOGITS // (vocabulary(network) or 1)))
        try:
            for batch in bar.track(batches[rank::processes], description=description):
                scores |= _score_batch(network, backbone, batch, rows, prefill_chunk_size)
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


def check_blocks(network: nn.Module, block: int) -> None:
    """Refuses a model that a cache does not read as one pass does, which is also measured on a few tokens.

    Raises:
        ValueError: says why, and to leave `prefill_chunk_size` out.
    """
    kind, why = type(network).__name__, None
    if cache_argument(network) is None or not hasattr(network, "config"):
        why = "takes no cache of keys and values"
    elif follows_length(network):
        why = "reads each token by the length of the whole input, which cached ones cannot follow"
    elif not reads_blocks(network, min(block, BLOCK)):
        why = "reads blocks with a cache otherwise than one pass"
    if why is not None:
        raise ValueError(f"{kind} {why}, so it cannot be read in blocks. Leave `prefill_chunk_size` out.")


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


def reads_blocks(network: nn.Module, block: int) -> bool:
    """Whether blocks of so many tokens give the logits of one pass; recurrent layers often begin anew with each."""
    words = vocabulary(network) or 2
    ids = (torch.arange(4 * BLOCK) ** 2 * 7 + 3)[None] % words
    with evaluating(network), torch.no_grad():
        whole = logits_of(network, ids).float()
        try:
            parts = [logits_of(network, part, cache).float() for _, part, cache in _blocks(network, ids, block)]
        except Exception:  # whatever a foreign forward raises at a cache that it does not know
            return False
    spread = (whole - whole.mean(-1, keepdim=True)).norm()
    exact = torch.finfo(next(network.parameters()).dtype).eps < 1e-6
    return bool((torch.cat(parts) - whole).norm() <= (EXACT if exact else COARSE) * spread)


def _score_batch(
    network: nn.Module, backbone: nn.Module | None, batch: list[Run], rows_at_a_time: int, block: int | None
) -> dict[int, Tensor]:
    """NLL of the windows of runs of one length: index of the window -> fp32 [targets]."""
    ids = torch.stack([run.fed for run in batch])  # [B, L]
    rows = torch.cat([run.rows for run in batch])
    owners = torch.cat([torch.full_like(run.rows, row) for row, run in enumerate(batch)])
    targets = torch.cat([run.targets for run in batch])
    nll = torch.empty(len(targets))
    for start, part, cache in _blocks(network, ids, block):
        here = torch.nonzero((rows >= start) & (rows < start + part.shape[1])).flatten()
        read = _reader(network, backbone, part, owners[here] * part.shape[1] + rows[here] - start, cache)
        for first in range(0, len(here), rows_at_a_time):
            some = here[first : first + rows_at_a_time]
            logits = read(slice(first, first + rows_at_a_time)).float()  # the loss of bf16 logits would be rounded too
            loss = nn.functional.cross_entropy(logits, targets[some].to(logits.device), reduction="none")
            nll[some] = loss.cpu()
    members = [(index, window) for run in batch for index, window in run.members]
    pieces = nll.split([len(window.targets) for _, window in members])
    return {index: piece for (index, _), piece in zip(members, pieces, strict=True)}


def _blocks(network: Any, ids: Tensor, block: int | None) -> Iterator[tuple[int, Tensor, Any]]:
    """Where a block begins, its tokens [B, <= block], and the cache of those before; all at once where they fit."""
    if block is None or ids.shape[1] <= block:
        yield 0, ids, None
        return
    cache = DynamicCache(config=network.config.get_text_config(decoder=True))
    for start in range(0, ids.shape[1], block):
        yield start, ids[:, start : start + block], cache


def _reader(
    network: nn.Module, backbone: nn.Module | None, ids: Tensor, rows: Tensor, cache: Any
) -> Callable[[slice], Tensor]:
    """A function from a slice of `rows` (indices into the flattened batch) to its logits [rows, V]."""
    if backbone is None:
        logits = logits_of(network, ids, cache)
        logits = logits[rows.to(logits.device)]
        return lambda part: logits[part]
    outputs, _ = run_backbone(backbone, lambda: logits_of(network, ids, cache))
    hidden = rows_of(outputs, rows)
    return lambda part: run_head(backbone, outputs, hidden[part], lambda: logits_of(network, ids))


def _batches(runs: Sequence[Run], batch_size: int) -> list[list[Run]]:
    """Runs of equal length, at most `batch_size` together, longest first: what is too big fails early."""

    def length(run: Run) -> int:
        return len(run.fed)

    groups = [list(group) for _, group in groupby(sorted(runs, key=length, reverse=True), key=length)]
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
