"""Answers of a model to the prompts of trials: generated greedily with a cache, or read from one pass."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from transformers import GenerationConfig

from hf_posext.compat import quiet
from hf_posext.evaluation.forwards import LengthError, causal_lm, device_of, evaluating, logits_of
from hf_posext.evaluation.heads import replaced
from hf_posext.evaluation.retrieval import Trial

GENERATED, FORCED = "greedy, cached", "greedy, teacher-forced"


def decoding_of(model: nn.Module) -> str:
    """How a model answers: a model that cannot generate is given the answer, and its arg max must be each next token.

    For an exact match both are the same: up to the first wrong token the model reads the same text.
    """
    network: Any = causal_lm(model)
    can_generate = getattr(network, "can_generate", None)
    return GENERATED if can_generate is not None and can_generate() else FORCED


def answers(
    model: nn.Module,
    trials: Sequence[Trial],
    *,
    batch_size: int = 1,
    progress: bool | None = None,
    description: str = "answering",
) -> list[list[int]]:
    """The tokens that a model puts after each prompt, as many as the answer has.

    Args:
        model: a causal LM, also wrapped by PEFT, DDP or `torch.compile`; its training flags are left as they were.
        trials: prompts and answers.
        batch_size: prompts per pass; shorter ones are padded on the left.
        progress: a bar on stderr; None shows it where stderr is a terminal.
        description: words beside the bar.

    Returns:
        Token ids for each trial, in the order of `trials`.

    Raises:
        LengthError: prompts that are longer than the model can read.
    """
    network = causal_lm(model)
    is_generated = decoding_of(model) == GENERATED
    batches = _batches(trials, batch_size, is_padded=is_generated)
    console = Console(stderr=True)
    shown = console.is_terminal if progress is None else progress
    found: dict[int, list[int]] = {}
    with evaluating(network), torch.no_grad():
        for batch in track(batches, description, console=console, transient=True, disable=not shown):
            given = [trials[index] for index in batch]
            read = generated(network, given) if is_generated else forced(network, given)
            found.update(zip(batch, read, strict=True))
    return [found[index] for index in range(len(trials))]


def generated(network: Any, trials: Sequence[Trial]) -> list[list[int]]:
    """Tokens that the model's own `generate` adds to prompts, by arg max and nothing else.

    The generation config of a checkpoint may sample, punish repetition or forbid tokens, which would be part of what is
    measured; so a bare one is there for as long as this runs. It has no EOS: that is a wrong token like any other.

    Raises:
        LengthError: prompts that are longer than a learned table.
    """
    pad = padding_id(network)
    width, new = max(len(trial.prompt) for trial in trials), max(len(trial.answer) for trial in trials)
    rows = [[pad] * (width - len(trial.prompt)) + trial.prompt for trial in trials]
    mask = [[0] * (width - len(trial.prompt)) + [1] * len(trial.prompt) for trial in trials]
    ids, seen = (torch.tensor(each, device=device_of(network)) for each in (rows, mask))  # [B, width]
    options = {"max_new_tokens": new, "do_sample": False, "num_beams": 1, "use_cache": True}
    bare = GenerationConfig(pad_token_id=pad)
    try:
        with replaced(network, generation_config=bare), quiet():  # beyond N generate warns; the report says it
            made: Tensor = network.generate(input_ids=ids, attention_mask=seen, **options)
    except IndexError as error:
        raise LengthError(
            f"The model cannot read {width + new} tokens ({error}): a learned position table ends before. Patch the "
            "model, or leave this context length out."
        ) from error
    return [row[: len(trial.answer)] for row, trial in zip(made[:, width:].tolist(), trials, strict=True)]


def forced(network: nn.Module, trials: Sequence[Trial]) -> list[list[int]]:
    """Arg max at each token of the answer, of which the model is given those before; all trials have one length.

    Raises:
        LengthError: trials that are longer than a learned table.
    """
    ids = torch.tensor([[*trial.prompt, *trial.answer[:-1]] for trial in trials])  # [B, L]
    best = logits_of(network, ids).argmax(-1).reshape(ids.shape).tolist()
    return [row[len(trial.prompt) - 1 :] for row, trial in zip(best, trials, strict=True)]


def padding_id(network: Any) -> int:
    """The id that a model takes for padding: some number their positions by it."""
    config = getattr(network, "config", None)
    stated = getattr(config, "pad_token_id", None)
    return stated if isinstance(stated, int) and stated >= 0 else 0


def _batches(trials: Sequence[Trial], batch_size: int, *, is_padded: bool) -> list[list[int]]:
    """Indices of at most `batch_size` trials, longest first; of one length together where nothing may be padded."""

    def length(index: int) -> int:
        return len(trials[index].prompt) + len(trials[index].answer)

    order = sorted(range(len(trials)), key=length, reverse=True)
    groups = [order] if is_padded else [list(group) for _, group in groupby(order, key=length)]
    return [group[start : start + batch_size] for group in groups for start in range(0, len(group), batch_size)]
