"""The recipe that swaps the position encoding: nothing else differs, and the numbers are what was measured."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.text import Text
from transformers import GPT2LMHeadModel, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from hf_posext import PerplexityReport
from hf_posext.evaluation.perplexity_report import Measurement

sys.path.append(str(Path(__file__).parents[1] / "recipes"))
import compare_encodings
import encodings_models
from compare_encodings import averaged, gains, mean_curve, plot, ranking, reading, spread, verdict
from encodings_models import ENCODINGS, Books, Settings, build, read_books, rotating_attention, run_cell, train

TINY = Settings(length=32, width=32, layers=1, heads=2, steps=3, batch=4, evaluations=1, windows=1, endpoints=1)
VOCABULARY = 1024
TABLE, BIAS = "transformer.wpe.weight", "transformer.h.0.attn.posext_bias"
DOCUMENTS = 6


@pytest.fixture(scope="module")
def books() -> Books:
    return read_books(TINY.length, TINY.windows)


def parameters(model: GPT2LMHeadModel) -> dict[str, torch.Tensor]:
    return {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_is_no_encoding_starts_with_the_same_values(encoding: str) -> None:
    plain, other = (parameters(build(name, TINY, 3, VOCABULARY)) for name in ("learned", encoding))
    shared = plain.keys() - {TABLE}
    assert other.keys() - {TABLE, BIAS} == shared
    assert all(torch.equal(plain[name], other[name]) for name in shared)


def test_another_seed_starts_with_other_values() -> None:
    one, other = (parameters(build("nope", TINY, seed, VOCABULARY)) for seed in (0, 1))
    assert not torch.equal(one["transformer.wte.weight"], other["transformer.wte.weight"])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_order_matters_with_every_encoding_but_none(encoding: str) -> None:
    model = build(encoding, TINY, 0, VOCABULARY).eval()
    for each in parameters(model).values():
        each.normal_(std=0.3)
    text = torch.arange(20)[None]
    turned = torch.cat((text[:, :-1].flip(1), text[:, -1:]), dim=1)
    with torch.no_grad():
        one, other = (model(ids).logits[0, -1] for ids in (text, turned))
    assert torch.allclose(one, other, atol=1e-4) == (encoding == "nope")


def test_rotation_is_that_of_transformers() -> None:
    query, key, value = torch.randn(3, 2, 4, 10, 16).unbind()
    rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=4))
    turned = apply_rotary_pos_emb(query, key, *rotary(value, torch.arange(10)[None]))
    expected = torch.nn.functional.scaled_dot_product_attention(*turned, value, is_causal=True)
    module = build("rope", TINY, 0, VOCABULARY).transformer.h[0].attn
    found, _ = rotating_attention(module, query, key, value, None)
    torch.testing.assert_close(found.transpose(1, 2), expected, atol=1e-5, rtol=1e-5)


def test_rotation_without_known_positions_is_refused() -> None:
    states = torch.randn(2, 1, 2, 5, 8)
    with pytest.raises(ValueError, match="without a cache"):
        rotating_attention(torch.nn.Module(), states[0, :, :, -1:], *states, None)


Trained = Callable[[str, int], tuple[GPT2LMHeadModel, list[torch.Tensor]]]


@pytest.fixture(scope="module")
def trained(books: Books, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The model after training with an encoding from a seed, and the tokens that it was given."""
    folder = tmp_path_factory.mktemp("trained")

    @cache
    def training(encoding: str, seed: int) -> tuple[GPT2LMHeadModel, list[torch.Tensor]]:
        model, given = build(encoding, TINY, seed, VOCABULARY), []
        model.register_forward_pre_hook(lambda _, args, kwargs: given.append(kwargs["input_ids"]), with_kwargs=True)
        train(model, books, TINY, seed, folder)
        return model, given

    return training


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_all_encodings_read_the_same_batches(trained: Trained, encoding: str) -> None:
    (_, expected), (_, found) = trained("learned", 0), trained(encoding, 0)
    assert len(found) > TINY.steps
    assert [each.tolist() for each in found] == [each.tolist() for each in expected]


def test_another_seed_reads_in_another_order(trained: Trained) -> None:
    (_, one), (_, other) = trained("learned", 0), trained("learned", 1)
    assert not torch.equal(one[0], other[0])


@pytest.mark.parametrize("encoding", ["alibi", "nope", "relative_bias", "rope"])
def test_training_makes_no_table_where_there_is_to_be_none(trained: Trained, encoding: str) -> None:
    model, _ = trained(encoding, 0)
    assert not model.transformer.wpe(torch.arange(TINY.lengths[-1])[None]).any()


@pytest.mark.parametrize(("encoding", "name"), [("learned", TABLE), ("relative_bias", BIAS)])
def test_training_reaches_what_is_learned(trained: Trained, encoding: str, name: str) -> None:
    model, _ = trained(encoding, 0)
    assert not torch.equal(parameters(model)[name], parameters(build(encoding, TINY, 0, VOCABULARY))[name])


def test_windows_are_of_one_length_and_follow_one_another(books: Books) -> None:
    bos = books.tokenizer.bos_token_id
    assert {len(window) for window in books.training + books.validation} == {TINY.length}
    assert {window[0] for window in books.training + books.validation} == {bos}
    text = books.tokenizer.decode(books.training[0][1:] + books.training[1][1:])
    assert encodings_models.training_documents()[0].startswith(text)
    assert len(books.validation) == len(books.held_out) * TINY.windows


@pytest.mark.parametrize(("most", "expected"), [(2, [[0], [5]]), (3, [[0], [3], [6]]), (99, [[n] for n in range(10)])])
def test_windows_are_taken_evenly(most: int, expected: list[list[int]]) -> None:
    assert encodings_models.evenly([[n] for n in range(10)], most) == expected


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What a run of three encodings leaves."""
    folder = tmp_path_factory.mktemp("encodings")
    compare_encodings.run(TINY, ["learned", "rope", "nope"], [0], folder)
    return folder


def test_a_run_leaves_its_numbers_and_its_picture(folder: Path) -> None:
    assert {"encodings.png", "encodings.svg", "encodings_dark.png", "encodings_dark.svg"} <= {
        path.name for path in folder.iterdir()
    }
    found = json.loads((folder / "encodings.json").read_text())
    measured = [(row["arm"], row["context_length"]) for row in found["rows"]]
    assert measured == [("learned", 32), *((arm, length) for arm in ("rope", "nope") for length in (32, 64, 128))]
    assert [each["curve"][-1]["step"] for each in found["cells"]] == [TINY.steps] * 3
    assert "learned has no rows beyond 32 tokens" in " ".join(found["reading"])


def test_what_is_done_is_not_done_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(encodings_models, "train")
    assert run_cell("rope", TINY, 0, folder)["encoding"] == "rope"


def test_other_settings_are_another_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(encodings_models, "train")
    with pytest.raises(NameError, match="train"):
        run_cell("rope", replace(TINY, steps=4), 0, folder)


def cell(encoding: str, shifts: Sequence[Sequence[float]], losses: Sequence[float] = (4.0, 3.0)) -> dict[str, Any]:
    """What was measured of one encoding: at each length 2 nats per token and the shift of each document."""
    protocol = {
        "protocol": "tail", "targets": 10, "stride": None, "context_lengths": [32, 64, 128],
        "resamples": 200, "seed": 0,
    }  # fmt: skip
    measurements = [
        Measurement(encoding, length, tuple(range(len(own))), tuple(10 * (2 + each) for each in own), (10,) * len(own))
        for length, own in zip((32, 64, 128), shifts, strict=False)
    ]
    return {
        "encoding": encoding,
        "how": "",
        "epochs": 1.0,
        "settings": {"batch": 4, "length": 32},
        "curve": [{"step": 10 * (place + 1), "loss": loss} for place, loss in enumerate(losses)],
        "report": PerplexityReport(protocol, measurements, {}, 32).to_dict(),
    }


def flat(*shifts: float) -> list[list[float]]:
    return [[shift] * DOCUMENTS for shift in shifts]


def test_seeds_are_averaged_document_by_document() -> None:
    one, other = [[0.1, 0.2]], [[0.3, 0.8]]
    found = averaged([cell("rope", one), cell("rope", other)]).measurements[0]
    assert [nll / tokens for nll, tokens in zip(found.nll, found.tokens, strict=True)] == pytest.approx([2.2, 2.5])


def test_curves_are_averaged_and_keep_their_extremes() -> None:
    found = mean_curve([cell("rope", flat(0), (4.0, 3.0)), cell("rope", flat(0), (5.0, 3.5))])
    assert found == [
        {"step": 10, "loss": 4.5, "low": 4.0, "high": 5.0},
        {"step": 20, "loss": 3.25, "low": 3.0, "high": 3.5},
    ]


def test_longer_contexts_are_compared_with_the_same_documents_at_the_trained_length() -> None:
    shifts = [[0.0, 1.0, 2.0], [0.5, 1.5, 2.5], [-0.25, 0.75, 1.75]]
    found = gains(averaged([cell("rope", shifts)]), "rope")
    numbers = [[each[key] for key in ("difference", "low", "high")] for each in found]
    assert numbers == [pytest.approx([0.5] * 3), pytest.approx([-0.25] * 3)]


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ([0.1] * DOCUMENTS, "loses, +0.100"),
        ([-0.1] * DOCUMENTS, "gains, -0.100"),
        ([-1.0, 1.0] * (DOCUMENTS // 2), "neither loses nor gains for sure"),
    ],
)
def test_a_verdict_needs_an_interval_on_one_side(last: list[float], words: str) -> None:
    assert words in verdict(averaged([cell("rope", [*flat(0, 0), last])]), "rope")


def test_an_encoding_without_more_rows_cannot_read_more() -> None:
    assert "cannot read more" in verdict(averaged([cell("learned", flat(0))]), "learned")


def test_the_ranking_leaves_out_what_cannot_read_that_length() -> None:
    cells = [cell("rope", flat(0, 0, 0.5)), cell("nope", flat(1, 1, 0.25)), cell("learned", flat(-1))]
    report = PerplexityReport.join(averaged([each]) for each in cells)
    assert "128 tokens of context nope has" in (found := ranking(report, 128))
    assert "rope +0.250" in found
    assert "learned" not in found


def test_the_reading_says_what_one_start_is_worth() -> None:
    one, two = [cell("rope", flat(0, 0, 0))], [cell("rope", flat(0, 0, 0), (4, last)) for last in (3.0, 3.5)]
    assert reading({"rope": one}, averaged(one))[-1].startswith("One start only")
    assert "up to 0.500 nats" in reading({"rope": two}, averaged(two))[-1]


@pytest.mark.parametrize(
    ("heights", "expected"),
    [
        ([0.0, 1.0, 3.0], [0.0, 1.0, 3.0]),
        ([5.0, 5.0, 5.0], [4.0, 5.0, 6.0]),
        ([2.0, 0.0, 2.2], [1.6, 0.0, 2.6]),
        ([1.0, 0.9, 0.0], [4.9 / 3, 1.9 / 3, -1.1 / 3]),
    ],
)
def test_labels_move_as_little_as_they_can(heights: list[float], expected: list[float]) -> None:
    assert spread(heights, 1.0) == pytest.approx(expected)


def test_a_picture_of_nothing_but_a_table_that_ends_is_drawn() -> None:
    cells = {"learned": [cell("learned", flat(0))]}
    texts = [text.get_text() for text in plot(cells, averaged(cells["learned"])).axes[1].texts]
    assert "learned ends here" in texts


def test_no_two_labels_of_lines_that_end_together_overlap() -> None:
    cells = {name: [cell(name, flat(0, 0, 0))] for name in ENCODINGS if name != "learned"}
    cells["learned"] = [cell("learned", flat(0))]
    figure = plot(cells, PerplexityReport.join(averaged(own) for own in cells.values()))
    figure.draw_without_rendering()
    names = [[text for text in axes.texts if text.get_text().split()[0] in ENCODINGS] for axes in figure.axes]
    assert [len(own) for own in names] == [6, 6]
    boxes = [[Text.get_window_extent(text) for text in own] for own in names]  # without the leaders
    assert not any(one.overlaps(other) for own in boxes for one, other in combinations(own, 2))
    assert all(figure.bbox.contains(*corner) for own in boxes for box in own for corner in box.corners())
