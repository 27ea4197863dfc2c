"""The number of each public evaluator on one model and one text, by its own formula and by a call of ours.

What an evaluator computes is spelled out on the left (`theirs`), from its authors' code, over a table of the model's
NLL in float64; what we are asked for the same number is on the right (`ours`). Neither knows the other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hf_posext.evaluation.perplexity import perplexity
from hf_posext.evaluation.perplexity_report import PerplexityReport
from hf_posext.evaluation.scoring import score
from hf_posext.evaluation.windows import sliding_windows
from tests.evaluation.stubs import BOS, LIKELY, VOCABULARY, word_tokenizer

MAX_LENGTH, STRIDE = 160, 16  # tokens, as the evaluators mean them: BOS and the last target included
HELD = MAX_LENGTH - 1  # tokens of text in a window that a BOS may precede
TEXT = [(BOS + 1 + place) % LIKELY for place in range(1055)]  # 159 + 56 * 16: whole strides; 6 * 160 + 95
AT_START, PER_TOKEN, BARE = 2.614, 0.0126, -0.01  # nats: before anything is read, gained per token read, without a BOS

Nats = NDArray[np.float64]


class Reciter(nn.Module):
    """Knows that each id is followed by the next one, and is the surer of it the more tokens it has read."""

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        """Logits [B, L, V]: log p of the next id, the rest of p spread over all others."""
        read = torch.arange(1, input_ids.shape[1] + 1, dtype=torch.float64)
        nll = AT_START - PER_TOKEN * read + BARE * (input_ids[:, :1] != BOS)  # [B, L]
        others = torch.log(-torch.expm1(-nll) / (VOCABULARY - 1))
        logits = others[..., None].expand(*input_ids.shape, VOCABULARY).clone()
        logits.scatter_(-1, (input_ids[..., None] + 1) % LIKELY, -nll[..., None])
        return SimpleNamespace(logits=logits.float())


def last(count: int, held: int, *, bos: bool) -> Nats:
    """NLL of the last `count` of `held` tokens in a row, BOS included: the one at index i has i tokens before it."""
    return AT_START - PER_TOKEN * np.arange(held - count, held, dtype=np.float64) + BARE * (not bos)


def strides(longest: int, stride: int, *, bos: bool, text: int = len(TEXT)) -> list[Nats]:
    """The windows that yarn, LongRoPE, PoSE and the HF docs share: what each of them scores.

    A window begins every `stride` tokens and its targets are what the one before did not hold; a token with nothing
    before it falls out of the loss.
    """
    scored, ended = [], 0
    for begin in range(0, text, stride):
        end = min(begin + longest, text)
        held = end - begin + bos
        scored.append(last(min(end - ended, held - 1), held, bos=bos))
        ended = end
        if end == text:
            break
    return scored


def yarn() -> float:
    """jquesnelle/yarn eval/perplexity.py (LongRoPE, EasyContext, axolotl too): `exp(stack(nlls).mean())`.

    `nlls` has the mean loss of each window; a BOS stands before every window and is part of `max_length`.
    """
    return np.exp(np.mean([window.mean() for window in strides(HELD, STRIDE, bos=True)]))


def yarn_truncated() -> float:
    """The same with `--truncate` (eval.sh, Proof-pile): the text is cut to one window and the stride is all of it."""
    (window,) = strides(HELD, HELD, bos=True, text=HELD)
    return np.exp(window.mean())


def pose() -> float:
    """dwzhu-pku/PoSE src/eval_ppl.py: `total_nll += loss * trg_len`; what PI's text calls "S=256"."""
    windows = strides(HELD, STRIDE, bos=True)
    return np.exp(sum(window.mean() * len(window) for window in windows) / sum(map(len, windows)))


def hf_docs() -> float:
    """transformers docs/source/en/perplexity.md as it is now: `nll_sum += loss * num_loss_tokens`, without a BOS.

    `num_loss_tokens` is one less than the labels for every window, though only the first one loses a token by the
    shift: each later window counts for `stride - 1` tokens.
    """
    first, *later = strides(HELD, STRIDE, bos=False)
    weights = [len(first), *(len(window) - 1 for window in later)]
    return np.exp(np.average([first.mean(), *(window.mean() for window in later)], weights=weights))


def hf_docs_older() -> float:
    """The same page before, and most copies of it: `exp(stack(nlls).mean())`."""
    return np.exp(np.mean([window.mean() for window in strides(HELD, STRIDE, bos=False)]))


def hf_docs_disjoint() -> float:
    """The page's `stride = max_length`, "about the same as the GPT-2 paper": the first token of a window is lost."""
    sizes = [min(MAX_LENGTH, len(TEXT) - begin) for begin in range(0, len(TEXT), MAX_LENGTH)]
    windows = [last(size - 1, size, bos=False) for size in sizes]
    return np.exp(np.concatenate(windows).sum() / sum(size - 1 for size in sizes))


def longlora() -> float:
    """dvlab-research/LongLoRA eval.py (and ChunkLlama, LCEG): all tokens of every overlapping window, and its own e.

    `all_ix = range(0, len - seq_len, 256)` without its last one, `loss` of each with `labels=x`, mean over windows.
    """
    begins = range(0, len(TEXT) - MAX_LENGTH, STRIDE)[:-1]
    return 2.71828 ** np.mean([last(MAX_LENGTH - 1, MAX_LENGTH, bos=False).mean() for _ in begins])


def lm_eval_rolling() -> float:
    """lm_eval/utils.py `get_rolling_token_windows(context_len=1)`: the last window reaches back for a full context.

    The prefix (BOS, else EOS) stands before the first window only; the first token of each later one is context.
    """
    total, predicted = last(MAX_LENGTH, MAX_LENGTH + 1, bos=True).sum(), MAX_LENGTH
    while predicted < len(TEXT):
        count = min(len(TEXT) - predicted, MAX_LENGTH)
        total += last(count, MAX_LENGTH + 1, bos=False).sum()
        predicted += count
    return np.exp(total / len(TEXT))


def fairseq() -> float:
    """fairseq eval_lm on blocks of `tokens_per_sample` (ALiBi's non-overlapping numbers): `source` is one behind.

    The eos stands before the text, the last token of a block before the next one; the last block is what is left.
    """
    sizes = [min(MAX_LENGTH, len(TEXT) - begin) for begin in range(0, len(TEXT), MAX_LENGTH)]
    blocks = [last(size, size + 1, bos=block == 0) for block, size in enumerate(sizes)]
    return np.exp(np.concatenate(blocks).sum() / len(TEXT))


def fairseq_context_window() -> float:
    """fairseq eval_lm `--context-window C` (ALiBi's sliding numbers): C tokens before each block of T - C.

    On whole blocks of the text; the eos is the first of the tokens that may be pushed out.
    """
    total, blocks = 0.0, len(TEXT) // STRIDE
    for block in range(blocks):
        kept = min(block * STRIDE, MAX_LENGTH - STRIDE)  # source tokens before the block, of those the eos is the first
        total += last(STRIDE, kept + STRIDE + 1, bos=kept == block * STRIDE).sum()
    return np.exp(total / (blocks * STRIDE))


def report(protocol: str, *, documents: list[list[int]] | None = None, length: int, bos: str) -> PerplexityReport:
    """Our own perplexity of the text, or of what the evaluator makes of it."""
    return perplexity(
        Reciter(), word_tokenizer(adds_bos=True, bos_token="<s>"), documents or [TEXT], context_lengths=[length],
        protocol=protocol, stride=STRIDE if protocol == "sliding" else None, bos=bos, resamples=10,
    )  # fmt: skip


def number(protocol: str, **settings: object) -> float:
    """The perplexity in its only row."""
    (row,) = report(protocol, **settings).rows
    return row["perplexity"]


def windows_of_ours(*, bos: bool) -> list[Tensor]:
    """NLL of each of our sliding windows, which the report adds up."""
    cut, _ = sliding_windows([torch.tensor(TEXT)], HELD - (not bos), STRIDE, bos=BOS if bos else None)
    return [nll.double() for nll in score(Reciter(), cut)]


def mean_of_window_means(*, bos: bool) -> float:
    """Every window with the same weight, however many tokens it scores."""
    return float(torch.stack([nll.mean() for nll in windows_of_ours(bos=bos)]).mean().exp())


def one_token_less() -> float:
    """Every window but the first with the weight of one token less."""
    first, *later = windows_of_ours(bos=False)
    total = first.sum() + sum(nll.mean() * (len(nll) - 1) for nll in later)
    return float((total / (len(first) + sum(len(nll) - 1 for nll in later))).exp())


def pieces(size: int, step: int, text: list[int] = TEXT) -> list[list[int]]:
    """The text in pieces of `size` tokens, `step` apart, the last one shorter."""
    return [text[begin : begin + size] for begin in range(0, len(text), step)]


def overlapping() -> list[list[int]]:
    """The pieces that LongLoRA scores whole."""
    return pieces(MAX_LENGTH, STRIDE)[: len(range(0, len(TEXT) - MAX_LENGTH, STRIDE)) - 1]


@dataclass(frozen=True)
class Evaluator:
    """One public evaluator, and its perplexity of the text as docs/evaluation.md has it."""

    id: str
    shown: float
    theirs: Callable[[], float]
    ours: Callable[[], float]


WITH_BOS = [BOS, *TEXT]  # fairseq's eos stands before the text, not before each window
WHOLE_BLOCKS = WITH_BOS[: 1 + len(TEXT) // STRIDE * STRIDE]
EVALUATORS = (
    Evaluator("yarn", 2.06, yarn, lambda: mean_of_window_means(bos=True)),
    Evaluator("yarn --truncate", 4.98, yarn_truncated, lambda: number("full", length=HELD, bos="every")),
    Evaluator("PoSE", 2.32, pose, lambda: number("sliding", length=HELD, bos="every")),
    Evaluator("HF docs", 2.34, hf_docs, one_token_less),
    Evaluator("HF docs before", 2.06, hf_docs_older, lambda: mean_of_window_means(bos=False)),
    Evaluator(
        "HF docs, stride = max_length",
        5.12,
        hf_docs_disjoint,
        lambda: number("full", documents=pieces(MAX_LENGTH, MAX_LENGTH), length=MAX_LENGTH - 1, bos="none"),
    ),
    Evaluator(
        "LongLoRA",
        4.93,
        longlora,
        lambda: 2.71828 ** np.log(number("full", documents=overlapping(), length=MAX_LENGTH - 1, bos="none")),
    ),
    Evaluator("lm-eval rolling", 4.73, lm_eval_rolling, lambda: number("disjoint", length=MAX_LENGTH, bos="auto")),
    Evaluator(
        "fairseq",
        5.09,
        fairseq,
        lambda: number("full", documents=pieces(MAX_LENGTH + 1, MAX_LENGTH, WITH_BOS), length=MAX_LENGTH, bos="none"),
    ),
    Evaluator(
        "fairseq --context-window",
        2.28,
        fairseq_context_window,
        lambda: number("sliding", documents=[WHOLE_BLOCKS], length=MAX_LENGTH, bos="none"),
    ),
)
EVALUATOR = {row.id: row for row in EVALUATORS}


@pytest.mark.parametrize("row", EVALUATORS, ids=lambda row: row.id)
def test_the_number_of_each_public_evaluator_follows_from_our_call(row: Evaluator) -> None:
    assert row.ours() == pytest.approx(row.theirs(), rel=2e-6)
    assert row.shown == round(row.theirs(), 2)


def test_one_model_and_one_text_have_four_numbers() -> None:
    """Those of REFERENCE ("evaluators differ"): all four say "sliding window" or "perplexity at this length"."""
    shown = {name: round(EVALUATOR[name].ours(), 2) for name in ("yarn", "PoSE", "lm-eval rolling", "LongLoRA")}
    assert shown == {"yarn": 2.06, "PoSE": 2.32, "lm-eval rolling": 4.73, "LongLoRA": 4.93}


@pytest.mark.parametrize(
    ("name", "factor"),
    [("yarn", 0.887), ("HF docs", 1.008), ("HF docs before", 0.888), ("LongLoRA", 2.126)],
)
def test_how_far_an_evaluator_that_weights_otherwise_is_from_each_token_once(name: str, factor: float) -> None:
    bos = "every" if name == "yarn" else "none"
    once = number("sliding", length=HELD - (bos == "none"), bos=bos)
    assert EVALUATOR[name].theirs() / once == pytest.approx(factor, abs=5e-4)


def test_where_strides_do_not_fill_the_text_their_last_window_has_less_context_than_ours() -> None:
    text = torch.tensor([*TEXT, *((TEXT[-1] + 1 + extra) % LIKELY for extra in range(5))])
    cut, _ = sliding_windows([text], HELD, STRIDE, bos=BOS)
    ours = [float(nll.double().mean()) for nll in score(Reciter(), cut)]
    theirs = [window.mean() for window in strides(HELD, STRIDE, bos=True, text=len(text))]
    assert ours[:-1] == pytest.approx(theirs[:-1], rel=1e-6)
    assert ours[-1] == pytest.approx(theirs[-1] - (STRIDE - 5) * PER_TOKEN, rel=1e-6)
