"""What a comparison says of its numbers: p values, verdicts, the price, and every form in which it is given out."""

import base64
import csv
import io
import json
import math
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_posext.evaluation.comparison_plot import FONT
from hf_posext.evaluation.comparison_report import ComparisonReport
from hf_posext.evaluation.perplexity_report import Measurement, PerplexityReport
from hf_posext.evaluation.significance import holm, p_value, smallest_p
from hf_posext.evaluation.statistics import nll_difference

DOCUMENTS = 12
SPREAD = np.linspace(-0.5, 0.5, DOCUMENTS)  # nats between documents, far more than between arms
WOBBLE = 0.02 * (-1.0) ** np.arange(DOCUMENTS)  # nats, of one sign as often as of the other
LENGTHS = (64, 128)
BARS = ("none", "truncate", "window")
VOID = ("meta", "source", "img", "br")


def measured(arm: str, length: int, nll: Any) -> Measurement:
    """Ten tokens of each document."""
    sums = tuple(float(value) for value in 10 * np.broadcast_to(nll, DOCUMENTS))
    return Measurement(arm, length, tuple(range(DOCUMENTS)), sums, (10,) * DOCUMENTS)


def report(
    long: dict[str, Any] | None = None, short: dict[str, Any] | None = None, **protocol: Any
) -> ComparisonReport:
    """Arms with a mean NLL of 2 nats at 64 tokens, where nothing is patched, and one that is given at 128."""
    at_128 = {"none": 4.0, "truncate": 2.0, "window": 2.0, "good": 1.9, "bad": 2.3, "even": 2.0 + WOBBLE} | (long or {})
    at_64 = {"none": 2.0, "good": 2.05, "bad": 3.0, "even": 2.0} | (short or {})
    settings = {
        "protocol": "tail", "context_lengths": [*LENGTHS], "targets": 10, "stride": None, "bos": "auto",
        "bars": [*BARS], "batch_size": 1, "chunk": 8, "seed": 0, "resamples": 10_000, "digest": "abc",
    }  # fmt: skip
    records = {
        arm: None if arm in BARS else {"method": arm, "factor": "T / N", "by_context_length": {128: {}}}
        for arm in at_128
    }
    return ComparisonReport(
        {**settings, **protocol},
        [
            measured(arm, length, (2.0, nll)[length == 128] + SPREAD)
            for arm, nll in at_128.items()
            for length in LENGTHS
        ],
        records,
        64,
        notes=["a note"],
        short=[measured(arm, 64, nll + SPREAD) for arm, nll in at_64.items()],
    )


def found(comparison: ComparisonReport, arm: str, versus: str = "truncate", length: int = 128) -> dict[str, Any]:
    """One comparison."""
    (row,) = (
        row
        for row in comparison.significance
        if (row["arm"], row["versus"], row["context_length"]) == (arm, versus, length)
    )
    return row


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),  # R 4.3: p.adjust(x, "holm")
        ([0.5, 0.5], [1.0, 1.0]),
        ([0.02], [0.02]),
        ([], []),
        ([0.01, 0.01, 0.01], [0.03, 0.03, 0.03]),
        ([0.04, 0.001, 0.012], [0.04, 0.003, 0.024]),
    ],
)
def test_holm_corrects_known_values(values: list[float], expected: list[float]) -> None:
    assert holm(values) == pytest.approx(expected)


SLEEP = (  # extra hours of ten patients with each of two drugs (Student 1908); R 4.3: t.test(paired = TRUE)
    [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0],
    [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4],
)


def test_p_is_that_of_students_paired_test_on_his_own_data() -> None:
    one, other = SLEEP
    assert p_value(one, [1] * 10, other, [1] * 10) == pytest.approx(0.002833, abs=5e-7)


@pytest.mark.parametrize("seed", range(12))
def test_p_is_about_5_percent_where_the_interval_ends_at_zero(seed: int) -> None:
    generator = np.random.default_rng(seed)
    sums, tokens = generator.normal(0.4, 1.0, 30), generator.integers(1, 5, 30)
    zero = np.zeros(30)
    interval = nll_difference(sums, tokens, zero, tokens)
    p = p_value(sums, tokens, zero, tokens)
    assert p < 0.06 if interval.low > 0 or interval.high < 0 else p > 0.04


@pytest.mark.parametrize(("documents", "smallest"), [(2, 0.5), (6, 2**-5), (12, 2**-11), (40, 2**-39)])
def test_few_documents_that_agree_are_no_proof(documents: int, smallest: float) -> None:
    ones, zeros = [1.0] * documents, [0.0] * documents
    assert p_value(ones, ones, zeros, ones) == smallest == smallest_p(documents)


@pytest.mark.parametrize("nll", [math.nan, math.inf])
def test_a_nll_that_is_not_finite_has_no_p_of_its_own(nll: float) -> None:
    p = p_value([nll, 1.0], [1, 1], [nll, 0.0], [1, 1])
    assert math.isnan(p)


def test_one_document_has_no_p() -> None:
    assert math.isnan(p_value([1.0], [1], [0.0], [1]))


def test_other_documents_have_no_p() -> None:
    with pytest.raises(ValueError, match="the same documents, got 3 and 2"):
        p_value([1.0, 2.0, 3.0], [1, 1, 1], [0.0, 0.0], [1, 1])


@pytest.mark.parametrize(
    ("arm", "difference", "verdict"),
    [
        ("good", -0.1, "better"),
        ("bad", 0.3, "worse"),
        ("none", 2.0, "worse"),
        ("even", 0.0, "not clearly different"),
        ("window", 0.0, "not clearly different"),
    ],
)
def test_an_arm_is_told_from_truncate(arm: str, difference: float, verdict: str) -> None:
    row = found(report(), arm)
    assert row["difference"] == pytest.approx(difference, abs=1e-9)
    assert row["verdict"] == verdict


def test_the_correction_counts_the_comparisons_with_one_bar_that_could_differ() -> None:
    """At 128 four arms differ from `truncate`, at 64 none does: the smallest p is multiplied by four."""
    row = found(report(), "good")
    assert row["p"] == pytest.approx(2**-11)
    assert row["comparisons"] == 4
    assert row["p_holm"] == pytest.approx(4 * 2**-11)
    assert found(report(), "good", length=64)["p_holm"] == 1.0


def test_many_arms_make_one_of_them_no_proof() -> None:
    many = {f"arm {index}": 2.0 + WOBBLE + index / 1e4 for index in range(110)}
    crowded = report(many, resamples=2000)
    assert found(crowded, "good")["p"] == 2**-11
    assert found(crowded, "good")["verdict"] == "not clearly different"
    assert "no verdict is possible: 12 documents, 114 comparisons" in " ".join(str(crowded).split())


def test_both_bars_are_compared_with_and_once_with_one_another() -> None:
    pairs = {(row["arm"], row["versus"]) for row in report().significance}
    arms = {"none", "good", "bad", "even"}
    assert pairs == {(arm, bar) for arm in arms for bar in ("truncate", "window")} | {("window", "truncate")}


def test_a_broken_arm_has_no_verdict_and_gives_valid_json() -> None:
    broken = report({"bad": math.nan})
    assert found(broken, "bad")["verdict"] is None
    assert found(broken, "good")["verdict"] == "better"
    json.loads(broken.to_json(), parse_constant=pytest.fail)
    assert "`good` is the best" in " ".join(broken.reading)
    broken.to_html()


def test_the_price_is_the_paired_difference_to_the_unpatched_model() -> None:
    rows = {row["arm"]: row for row in report().short_rows}
    differences = [rows[arm]["difference"] for arm in ("none", "good", "bad", "even")]
    assert differences == pytest.approx([0.0, 0.05, 1.0, 0.0], abs=1e-9)
    assert rows["bad"]["perplexity"] == pytest.approx(math.exp(3.0))
    assert rows["good"]["difference_low"] == pytest.approx(0.05)
    assert [rows[arm]["patched_for"] for arm in ("none", "good")] == [None, 128]


def test_the_tradeoff_has_the_price_and_the_loss_of_each_arm() -> None:
    points = {point["arm"]: (point["short"], point["long"]) for point in report().tradeoff}
    expected = {"none": (0, 4), "good": (0.05, 1.9), "bad": (1, 2.3), "even": (0, 2)}
    assert list(points) == list(expected)
    assert [*points.values()] == pytest.approx(np.array([*expected.values()]), abs=1e-9)
    assert (report().tradeoff[1]["long_low"], report().tradeoff[1]["versus"]) == (pytest.approx(1.9), "truncate")


def test_without_bars_there_is_neither_a_comparison_nor_an_interval() -> None:
    bare = report()
    bare.measurements = [one for one in bare.measurements if one.arm not in BARS]
    assert bare.significance == []
    assert {point["long_low"] for point in bare.tradeoff} == {None}
    assert bare.reading == ["At 128 tokens `good` is the best method with 6.69."]
    bare.plot_tradeoff()


def test_the_best_method_is_told_from_both_bars() -> None:
    (sentence,) = report().reading
    assert sentence.startswith("At 128 tokens `good` is the best method with 6.69: better (-0.100 nats per token [")
    assert "than `truncate` (7.39), better" in sentence
    assert sentence.endswith("than `window` (7.39).")


def test_a_report_survives_json() -> None:
    before = report()
    after = ComparisonReport.from_dict(json.loads(before.to_json()))
    assert after.to_dict() == before.to_dict() == json.loads(before.to_json())
    assert {"protocol", "rows", "record", "significance", "short_rows", "tradeoff"} <= set(after.to_dict())


def test_joined_reports_keep_their_prices() -> None:
    joined = ComparisonReport.join([report(), report({"other": 2.2}, {"other": 2.1})])
    assert joined.arms == [*BARS, "good", "bad", "even", "other"]
    assert [row["arm"] for row in joined.short_rows] == ["none", "good", "bad", "even", "other"]


def test_joined_as_perplexity_reports_they_keep_their_arms_alone() -> None:
    plain = PerplexityReport.join([report()])
    assert type(plain) is PerplexityReport
    assert (plain.rows, plain.records, plain.notes) == (report().rows, report().records, report().notes)
    assert "short" not in plain.to_dict()


def test_terminal_and_notebook_show_numbers_verdicts_and_notes() -> None:
    text, page = str(report()), report()._repr_mimebundle_([], [])["text/html"]
    assert "-0.100 better" in text
    assert "+0.300 worse" in text
    assert "The price: patched for 128 tokens, given 64" in text
    assert "note: a note" in text
    assert "-0.100 better" in page


def test_csv_has_a_line_for_each_number(tmp_path: Path) -> None:
    text = report().to_csv(tmp_path / "rows.csv")
    assert (tmp_path / "rows.csv").read_text() == text
    rows = [*csv.DictReader(io.StringIO(text))]
    assert len(rows) == 6 * 2 + 3
    good = next(row for row in rows if (row["arm"], row["context_length"]) == ("good", "128"))
    assert float(good["truncate_difference"]) == pytest.approx(-0.1)
    assert (good["truncate_verdict"], good["patched_for"]) == ("better", "128")
    assert [(row["arm"], row["context_length"], row["patched_for"]) for row in rows[-3:]] == [
        (arm, "64", "128") for arm in ("good", "bad", "even")
    ]


def test_markdown_tables_have_as_many_cells_as_headings(tmp_path: Path) -> None:
    text = report({"a|b": 2.0}).to_markdown(tmp_path / "report.md")
    assert (tmp_path / "report.md").read_text() == text
    lines = [line.replace("\\|", "") for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in lines} == {4}
    assert "| good | +0.000 ~ [+0.000, +0.000] | -0.100 better [-0.100, -0.100] |" in text


class Page(HTMLParser):
    """Checks that every element is closed, and collects text and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.words: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "srcset", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page as it was given and as it was written, which are the same."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    text = report().to_html(path)
    assert path.read_text(encoding="utf-8") == text
    return text


def test_the_page_is_whole_and_needs_nothing_else(html: str) -> None:
    text, page = html, Page(html)
    assert page.open == []
    assert "http" not in text
    assert all(address.startswith("data:image/svg+xml;base64,") for address in page.addresses)
    assert "prefers-color-scheme: dark" in text
    assert "script" not in page.tags


def test_the_page_has_each_figure_in_both_themes(html: str) -> None:
    addresses = Page(html).addresses
    images = [base64.b64decode(address.partition(",")[2]) for address in addresses]
    assert len(set(images)) == len(images) == 4
    assert {ET.fromstring(image).tag for image in images} == {"{http://www.w3.org/2000/svg}svg"}


def test_words_of_others_are_no_markup() -> None:
    text = report({"<script>x</script>&": 2.2}, {"<script>x</script>&": 2.2}).to_html()
    assert "<script" not in text
    assert "<script>x</script>&" in Page(text).words


def test_the_page_is_the_same_each_time(html: str) -> None:
    assert report().to_html() == html


@pytest.mark.parametrize("name", ["tradeoff.png", "tradeoff.svg"])
def test_the_figure_is_written(tmp_path: Path, name: str) -> None:
    report().plot_tradeoff(tmp_path / name)
    assert (tmp_path / name).read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


def test_the_figure_has_a_point_for_each_arm_and_a_line_for_each_bar() -> None:
    (axes,) = report().plot_tradeoff().axes
    points = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines if len(line.get_xdata()) == 1]
    assert np.array(points) == pytest.approx(np.array([(0, 4), (0.05, 1.9), (1, 2.3), (0, 2)]), abs=1e-9)
    bars = {line.get_label(): line.get_ydata()[0] for line in axes.lines if len(line.get_xdata()) == 2}
    assert bars == pytest.approx({"truncate": 2.0, "window": 2.0})
    assert "64 tokens, patched for 128 (nats per token)" in axes.get_xlabel()
    assert axes.get_ylabel() == "NLL at 128 tokens (nats per token)"
    assert sorted(text.get_text() for text in axes.texts) == ["bad", "even", "good", "none"]


def test_labels_do_not_cover_one_another() -> None:
    crowd = {f"method {index}": index / 500 for index in range(14)}
    figure = report({name: 2.1 + more for name, more in crowd.items()}, dict.fromkeys(crowd, 2.0)).plot_tradeoff()
    figure.draw_without_rendering()
    renderer: Any = figure._get_renderer()  # type: ignore[attr-defined]
    boxes = [super(type(text), text).get_window_extent(renderer).extents for text in figure.axes[0].texts]
    rows = sorted(boxes, key=lambda box: box[1])
    clashes = [
        (one, other)
        for index, one in enumerate(rows)
        for other in rows[index + 1 :]
        if min(one[2], other[2]) - max(one[0], other[0]) > 1 and min(one[3], other[3]) - max(one[1], other[1]) > 1
    ]
    assert len(boxes) == 18
    assert clashes == []
    assert {text.get_fontsize() for text in figure.axes[0].texts} == {FONT}


def test_a_report_without_a_price_cannot_be_drawn() -> None:
    bare = report()
    bare.short = []
    with pytest.raises(ValueError, match="no price in this report"):
        bare.plot_tradeoff()


def test_places_on_the_axes_keep_the_order_of_the_values() -> None:
    (axes,) = report().plot_tradeoff().axes
    places = axes.transData.transform([(0, value) for value in (1.9, 1.99, 2.0, 2.01, 2.3, 4.0)])[:, 1]
    steps = [after - before for before, after in pairwise(places)]
    assert min(steps) > 5


def test_a_report_without_one_finite_number_is_drawn() -> None:
    arms = ("none", "truncate", "window", "good", "bad", "even")
    void = report(dict.fromkeys(arms, math.nan), dict.fromkeys(("none", "good", "bad", "even"), math.nan))
    void = replace(void, measurements=[replace(each, nll=(math.nan,) * DOCUMENTS) for each in void.measurements])
    assert void.plot().axes
