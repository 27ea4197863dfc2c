"""The bars: the model without its patch, given less text or seeing less of it, or left out with a note."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import FalconConfig, FalconForCausalLM, GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

from hf_posext import inspect_model, patch_model, perplexity
from hf_posext.evaluation import scoring
from hf_posext.evaluation.perplexity_report import PerplexityReport
from hf_posext.evaluation.scoring import LengthError, score
from hf_posext.evaluation.windows import Window, disjoint_windows, full_windows, sliding_windows, tail_windows
from tests.evaluation.stubs import VOCABULARY, ContextCounter, documents, tiny_llama

TRAINED = 32
DOCUMENTS = documents(150, 97, 140)
LENGTHS = [16, 32, 64]
ROW_KEYS = ["arm", "context_length", "nll", "perplexity", "low", "high", "tokens", "documents", "skipped"]


def measure(model: nn.Module, docs: Any = DOCUMENTS, **settings: Any) -> PerplexityReport:
    """Perplexity on token ids, with few targets and few resamples."""
    defaults: dict[str, Any] = {"context_lengths": LENGTHS, "resamples": 200}
    if settings.get("protocol", "tail") == "tail":
        defaults["targets"] = 8
    return perplexity(model, None, docs, **{**defaults, **settings})


def nll(report: PerplexityReport, arm: str) -> list[float]:
    """Mean NLL of an arm at each length, in nats."""
    return [row["nll"] for row in report.rows if row["arm"] == arm]


def learned(kind: str) -> nn.Module:
    """A model with a table of 32 positions."""
    torch.manual_seed(0)
    if kind == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY,
                n_positions=TRAINED,
                n_embd=32,
                n_layer=1,
                n_head=2,
                bos_token_id=0,
                eos_token_id=0,
            )
        ).eval()
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCABULARY,
            max_position_embeddings=TRAINED,
            hidden_size=32,
            word_embed_proj_dim=32,
            ffn_dim=32,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    ).eval()


def unreached() -> nn.Module:
    """A model whose attention does not go through transformers' registry."""
    torch.manual_seed(0)
    config = FalconConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=TRAINED,
        initializer_range=0.3,
    )
    return FalconForCausalLM(config).eval()


def banded_nll(model: nn.Module, window: Window, width: int) -> Tensor:
    """NLL of the targets of a window under a 4-D mask that hides keys at a distance of `width` or more."""
    ids = window.tokens[:-1]
    places = torch.arange(len(ids))
    distance = places[:, None] - places
    seen = (distance >= 0) & (distance < width)
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        logits = model(input_ids=ids[None], attention_mask=mask, position_ids=places[None]).logits[0]
    return cross_entropy(logits[window.first - 1 : window.last], window.targets, reduction="sum")


CUTS: dict[str, Callable[[int], list[Window]]] = {
    "tail": lambda length: tail_windows(DOCUMENTS, LENGTHS, targets=8, endpoints_per_document=4)[0][length],
    "full": lambda length: full_windows(DOCUMENTS, length)[0],
    "sliding": lambda length: sliding_windows(DOCUMENTS, length, min(24, length))[0],
    "disjoint": lambda length: disjoint_windows(DOCUMENTS, length)[0],
}


@pytest.mark.parametrize("protocol", CUTS)
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_window_is_the_model_under_a_banded_mask(protocol: str, layers: int, attention: str) -> None:
    model = tiny_llama(num_hidden_layers=layers)
    model.set_attn_implementation(attention)
    settings = {"stride": 24} if protocol == "sliding" else {}
    found = nll(measure(model, protocol=protocol, bars=["window"], **settings), "window")
    for length, value in zip(LENGTHS, found, strict=True):
        windows = CUTS[protocol](length)
        total = sum(float(banded_nll(model, window, TRAINED)) for window in windows)
        assert value == pytest.approx(total / sum(len(window.targets) for window in windows), rel=1e-5)


def test_one_layer_with_a_window_sees_nothing_that_is_farther() -> None:
    """The first of 8 targets is predicted at the 57th of 64 tokens, which sees 32 of them: none of the first 25."""
    model = tiny_llama(num_hidden_layers=1)
    other = [torch.cat([(ids[: len(ids) - 40] + 1) % 40, ids[len(ids) - 40 :]]) for ids in DOCUMENTS]
    one, changed = (
        measure(model, docs, endpoints_per_document=1, bars=["window", "truncate"]) for docs in (DOCUMENTS, other)
    )
    assert nll(one, "window")[2] == pytest.approx(nll(changed, "window")[2], rel=1e-6)
    assert abs(nll(one, "none")[2] - nll(changed, "none")[2]) > 1e-3


@pytest.mark.parametrize("patch", [None, "pi", "yarn", "rerope", "nope"])
def test_up_to_the_trained_length_window_and_truncate_are_the_unpatched_model_to_the_last_bit(
    patch: str | None,
) -> None:
    model = tiny_llama()
    if patch is not None:
        patch_model(model, patch, 2)
    report = measure(model, bars=["truncate", "window", "none"])
    none, truncate, window = (nll(report, arm) for arm in ("none", "truncate", "window"))
    assert window[:2] == truncate[:2] == none[:2]
    assert truncate[2] == none[1]
    assert abs(window[2] - none[2]) > 1e-3


@pytest.mark.parametrize("patch", ["pi", "self_extend", "alibi"])
def test_the_bars_of_a_patched_model_are_those_of_the_unpatched_one(patch: str) -> None:
    unpatched = measure(tiny_llama())
    model = patch_model(tiny_llama(), patch, 2)
    with torch.no_grad():
        before = model(input_ids=DOCUMENTS[0][None]).logits
        report = measure(model)
        assert torch.equal(model(input_ids=DOCUMENTS[0][None]).logits, before)
    assert report.arms == [patch, "truncate", "window"]
    for bar in ("truncate", "window"):
        assert nll(report, bar) == nll(unpatched, bar)


def test_an_unpatched_model_is_left_as_it_was() -> None:
    model = tiny_llama()
    config = model.config.to_dict()
    with torch.no_grad():
        before = model(input_ids=DOCUMENTS[0][None]).logits
        assert measure(model).arms == ["none", "truncate", "window"]
        assert torch.equal(model(input_ids=DOCUMENTS[0][None]).logits, before)
    assert model.config.to_dict() == config
    assert inspect_model(model).record is None


@pytest.mark.parametrize("patch", [None, "pi"])
def test_no_length_is_read_twice(patch: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[str, int]] = []

    def counted(network: Any, windows: Any, *, description: str, **rest: Any) -> Any:
        read.extend({(description.partition(",")[0], len(window.fed)) for window in windows})
        return score(network, windows, description=description, **rest)

    monkeypatch.setattr("hf_posext.evaluation.measuring.score", counted)
    model = tiny_llama()
    if patch is not None:
        patch_model(model, patch, 2)
    measure(model, bars=["window", "truncate", "none"])
    own = [(patch or "none", length) for length in LENGTHS]
    bars = [] if patch is None else [("unpatched", length) for length in LENGTHS]
    assert sorted(read) == sorted([*own, *bars, ("window", 64)])


def test_both_honest_bars_are_there_by_default_for_tail_only() -> None:
    assert measure(tiny_llama()).arms == ["none", "truncate", "window"]
    assert measure(tiny_llama(), protocol="full").arms == ["none"]
    assert measure(tiny_llama(), bars=[]).arms == ["none"]


def test_rows_and_records_of_the_window_are_those_of_a_bar() -> None:
    data = measure(patch_model(tiny_llama(), "pi", 2)).to_dict()
    rows = [row for row in data["rows"] if row["arm"] == "window"]
    assert [list(row) for row in rows] == [ROW_KEYS] * 3
    assert data["records"] == {"pi": data["record"], "truncate": None, "window": None}
    assert data["protocol"]["bars"] == ["truncate", "window"]


def test_the_curve_of_protocol_full_has_the_window_too() -> None:
    report = measure(tiny_llama(), protocol="full", bars=["window"])
    arms = {arm: [bucket for bucket in report.curve if bucket["arm"] == arm] for arm in ("none", "window")}
    assert [bucket["first"] for bucket in arms["window"]] == [bucket["first"] for bucket in arms["none"]]
    short = [(one["nll"], other["nll"]) for one, other in zip(*arms.values(), strict=True) if one["last"] <= TRAINED]
    assert [other for _, other in short] == pytest.approx([one for one, _ in short], rel=1e-5)


LEFT_OUT: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], list[str], list[str]]] = {
    "attention that is not reached": (
        unreached,
        {},
        ["none", "truncate"],
        [
            "The bar `window` is left out: No attention of FalconForCausalLM goes through transformers' attention "
            "registry, which is where this method acts."
        ],
    ),
    "no trained length": (
        ContextCounter,
        {},
        ["none"],
        [f"The bar `{bar}` is left out: the config does not say a trained length." for bar in ("truncate", "window")],
    ),
    "table ends": (
        lambda: patch_model(learned("gpt2"), "alibi", 2),
        {"bars": ["none", "window", "truncate"]},
        ["alibi", "truncate"],
        [
            f"The bar `{bar}` is left out: The model cannot read 64 tokens (index out of range in self): a learned "
            "position table ends before."
            for bar in ("none", "window")
        ],
    ),
    "table with reserved rows ends": (
        lambda: patch_model(learned("opt"), "nope", 2),
        {},
        ["nope", "truncate"],
        [
            "The bar `window` is left out: The model cannot read 64 tokens (index out of range in self): a learned "
            "position table ends before."
        ],
    ),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_a_bar_that_a_model_cannot_have_is_left_out_with_a_note(case: str) -> None:
    make, settings, arms, notes = LEFT_OUT[case]
    model = make()
    report = measure(model, **settings)
    assert report.arms == arms
    assert [note for note in report.notes if "left out" in note] == notes
    assert set(report.records) == set(arms)


def test_a_table_that_is_long_enough_has_both_bars() -> None:
    report = measure(learned("gpt2"), context_lengths=[16, 32])
    assert report.arms == ["none", "truncate", "window"]
    assert nll(report, "window") == nll(report, "truncate") == nll(report, "none")


def test_a_model_patched_by_the_method_window_is_an_arm_of_another_name() -> None:
    report = measure(patch_model(tiny_llama(), "window", 2, width=16))
    assert report.arms == ["patched window", "truncate", "window"]
    assert nll(report, "patched window")[2] != nll(report, "window")[2]
    same = measure(patch_model(tiny_llama(), "window", 2))
    assert nll(same, "patched window") == nll(same, "window")


def test_bars_of_a_composed_patch_have_the_trained_length_of_the_unpatched_model() -> None:
    model = patch_model(patch_model(tiny_llama(), "pi", 2), "yarn", 2, compose=True)
    report = measure(model, context_lengths=[16, 32, 64, 80])
    unpatched = measure(tiny_llama(), context_lengths=[16, 32, 64, 80])
    assert report.trained_length == TRAINED
    assert report.notes == []
    for bar in ("truncate", "window"):
        assert nll(report, bar) == nll(unpatched, bar)


@pytest.mark.parametrize("fails", ["this process", "the other"])
def test_a_length_that_one_process_cannot_read_ends_all_of_them(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the others wait for it for ever: each tells what became of its share before it leaves."""
    length = 64 if fails == "this process" else 32
    told = []

    def gather(shares: list[Any], share: Any) -> None:
        told.append(share[1])
        shares[:] = [share, ({}, LengthError("too long") if fails == "the other" else None)]

    monkeypatch.setattr(scoring, "_place", lambda: (0, 2))
    monkeypatch.setattr(scoring.dist, "all_gather_object", gather)
    windows = full_windows(DOCUMENTS[:1], length)[0]
    with pytest.raises(LengthError):
        score(learned("gpt2"), windows)
    assert [type(failure) for failure in told] == [LengthError if fails == "this process" else type(None)]


def test_no_arm_may_have_the_name_of_the_window() -> None:
    with pytest.raises(ValueError, match="`arm` must not be the name of a bar"):
        measure(tiny_llama(), arm="window")
