"""What a report gives out: a table, plain data, JSON that is whole and valid, and a figure."""

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from rich.table import Table

from hf_posext.evaluation.perplexity_report import Measurement, PerplexityReport
from hf_posext.reports import Report, plain


class Small(Report):
    """A report of one table."""

    def __init__(self, value: Any = 1.5) -> None:
        self.value = value

    def table(self) -> Table:
        table = Table("what", "value")
        table.add_row("number", str(self.value))
        return table

    def to_dict(self) -> dict[str, Any]:
        return {"number": self.value}


def report(arms: dict[str, float], **changes: Any) -> PerplexityReport:
    """Arms with a mean NLL at 64 and one nat more at 128, over three documents that differ by half a nat."""
    protocol = {
        "protocol": "tail", "context_lengths": [64, 128], "targets": 10, "stride": None, "bos": "auto",
        "bars": ["truncate"], "batch_size": 1, "chunk": 8, "seed": 0, "resamples": 10_000, "digest": "abc",
    }  # fmt: skip
    measurements = [
        Measurement(
            arm, length, (0, 1, 3), tuple(10 * (nll + more + spread) for spread in (-0.5, 0, 0.5)), (10, 10, 10)
        )
        for arm, nll in arms.items()
        for length, more in ((64, 0.0), (128, 1.0))
    ]
    records = {arm: None if arm in ("none", "truncate", "window") else {"method": arm, "factor": 2.0} for arm in arms}
    return PerplexityReport({**protocol, **changes.pop("protocol", {})}, measurements, records, 64, [2], ["a note"])


def test_text_is_the_table() -> None:
    text = str(Small())
    assert "number" in text
    assert "1.5" in text
    assert repr(Small()) == text
    assert "\x1b" not in text


def test_terminal_and_notebook_show_the_same_table() -> None:
    console = Console(record=True, width=80, file=io.StringIO())
    console.print(Small())
    assert "1.5" in console.export_text()
    assert "1.5" in Small()._repr_mimebundle_([], [])["text/html"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, None),
        (math.inf, None),
        (np.float64(2.5), 2.5),
        (np.int64(3), 3),
        (np.arange(2), [0, 1]),
        (torch.tensor([1.0, math.nan]), [1.0, None]),
        ((1, "a", None, True), [1, "a", None, True]),
        ({"a": {1: -math.inf}}, {"a": {"1": None}}),
        (
            Measurement("pi", 64, (0,), (math.nan,), (10,)),
            {"arm": "pi", "context_length": 64, "documents": [0], "nll": [None], "tokens": [10], "positions": "all"},
        ),
    ],
)
def test_json_is_valid_for_every_number(value: Any, expected: Any) -> None:
    assert json.loads(Small(value).to_json(), parse_constant=pytest.fail) == {"number": expected}


def test_what_is_not_plain_is_refused() -> None:
    with pytest.raises(TypeError, match=r"plain data only, got .* of type object"):
        plain({"a": object()})
    with pytest.raises(TypeError, match=r"plain data only, got .* of type type"):
        plain(Measurement)


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    text = Small().to_json(path)
    assert json.loads(path.read_text()) == json.loads(text) == {"number": 1.5}
    with pytest.raises(TypeError):
        Small(object()).to_json(path)
    assert json.loads(path.read_text()) == {"number": 1.5}
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


def test_a_failed_write_leaves_the_old_file_and_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    Small().to_json(path)

    def fail(*paths: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        Small(2.5).to_json(path)
    assert json.loads(path.read_text()) == {"number": 1.5}
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


def test_perplexity_report_survives_json() -> None:
    before = report({"pi": 2.0, "truncate": 2.5})
    after = PerplexityReport.from_dict(json.loads(before.to_json()))
    assert after.to_dict() == before.to_dict() == json.loads(before.to_json())
    assert after.rows == before.rows


def test_rows_have_the_promised_keys_and_numbers() -> None:
    row = report({"pi": 2.0}).rows[0]
    assert list(row) == [
        "arm", "context_length", "nll", "perplexity", "low", "high", "tokens", "documents", "skipped",
    ]  # fmt: skip
    assert (row["arm"], row["context_length"], row["tokens"], row["documents"], row["skipped"]) == ("pi", 64, 30, 3, 1)
    assert row["perplexity"] == pytest.approx(math.exp(2.0))
    assert (row["low"], row["high"]) == pytest.approx((math.exp(1.5), math.exp(2.5)))


def test_a_nll_that_is_not_finite_gives_valid_json() -> None:
    broken = report({"pi": math.nan})
    rows = json.loads(broken.to_json(), parse_constant=pytest.fail)["rows"]
    assert (rows[0]["nll"], rows[0]["perplexity"], rows[0]["low"]) == (None, None, None)
    assert PerplexityReport.from_dict(broken.to_dict()).to_dict() == broken.to_dict()
    assert "nan" in str(broken)


def test_join_puts_arms_side_by_side_and_keeps_equal_bars_once() -> None:
    joined = PerplexityReport.join([report({"pi": 2.0, "truncate": 2.5}), report({"yarn": 1.5, "truncate": 2.5})])
    assert joined.arms == ["pi", "truncate", "yarn"]
    assert joined.notes == ["a note"]
    assert joined.to_dict()["records"]["yarn"] == {"method": "yarn", "factor": 2.0}
    assert joined.record == {"method": "pi", "factor": 2.0}


def test_join_keeps_the_curve_of_each_arm() -> None:
    one, other = report({"pi": 2.0, "truncate": 2.5}), report({"yarn": 1.5, "truncate": 2.2})
    one.curve = [{"arm": "pi", "nll": 2.0}, {"arm": "truncate", "nll": 2.5}]
    other.curve = [{"arm": "yarn", "nll": 1.5}, {"arm": "truncate", "nll": 2.2}]
    assert PerplexityReport.join([one, one, other]).curve == [
        *one.curve, {"arm": "yarn", "nll": 1.5}, {"arm": "truncate (yarn)", "nll": 2.2},
    ]  # fmt: skip


@pytest.mark.parametrize("bar", ["truncate", "window"])
def test_join_keeps_the_bar_of_a_tuned_model_apart(bar: str) -> None:
    joined = PerplexityReport.join([report({"pi": 2.0, bar: 2.5}), report({"tuned": 1.5, bar: 2.2})])
    assert joined.arms == ["pi", bar, "tuned", f"{bar} (tuned)"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"digest": "xyz"}, "differ in the scored tokens"), ({"bos": "none"}, "differ in `bos`: 'auto' and 'none'")],
)
def test_join_refuses_other_targets_and_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PerplexityReport.join([report({"pi": 2.0}), report({"yarn": 2.0}, protocol=changes)])


def test_join_does_not_mind_batches_and_bars() -> None:
    other = report({"yarn": 2.0}, protocol={"batch_size": 4, "chunk": 16, "bars": []})
    assert PerplexityReport.join([report({"pi": 2.0}), other]).arms == ["pi", "yarn"]


def test_join_refuses_two_arms_of_one_name_and_nothing() -> None:
    with pytest.raises(ValueError, match="an arm `pi` with other numbers"):
        PerplexityReport.join([report({"pi": 2.0}), report({"pi": 2.1})])
    with pytest.raises(ValueError, match="`reports` is empty"):
        PerplexityReport.join([])


def test_join_leaves_its_parts_alone() -> None:
    one = report({"pi": 2.0})
    before = one.to_dict()
    PerplexityReport.join([one, report({"yarn": 2.0})])
    assert one.to_dict() == before


def test_difference_is_paired() -> None:
    found = report({"pi": 2.1, "truncate": 2.0}).difference("pi", "truncate", 64)
    assert (found["arm"], found["versus"], found["context_length"], found["documents"]) == ("pi", "truncate", 64, 3)
    assert [found[key] for key in ("difference", "low", "high")] == pytest.approx([0.1] * 3)


@pytest.mark.parametrize(
    ("arms", "length", "message"),
    [(("yarm", "none"), 64, "Did you mean `yarn`"), (("yarn", "none"), 32, r"one of \[64, 128\]")],
)
def test_difference_names_what_was_not_measured(arms: tuple[str, str], length: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        report({"yarn": 2.0, "none": 2.0}).difference(*arms, length)


def test_table_says_what_was_measured() -> None:
    text = str(report({"pi": 2.0, "truncate": 2.5}))
    expected = [
        "last 10 tokens",
        "7.39",
        "[4.48, 12.18]",
        "3 documents (1 too short)",
        "trained length 64",
        "note: a note",
        "pi: factor 2.0",
        "pi - truncate at 128: -0.500 nats per token [-0.500, -0.500], paired",
    ]
    assert [part for part in expected if part not in text] == []


def test_differences_to_both_bars_are_printed() -> None:
    text = str(report({"pi": 2.0, "yarn": 2.25, "truncate": 2.5, "window": 1.5, "none": 5.0}))
    expected = [
        "pi - truncate at 128: -0.500 nats per token [-0.500, -0.500], paired",
        "yarn - truncate at 128: -0.250 nats",
        "pi - window at 128: +0.500 nats",
        "yarn - window at 128: +0.750 nats",
    ]
    assert [part for part in expected if part not in text] == []
    assert text.count("paired") == 4


def test_an_arm_that_was_measured_at_fewer_lengths_has_gaps() -> None:
    whole = report({"pi": 2.0, "truncate": 2.5})
    pi, _, *bar = whole.measurements
    part = PerplexityReport(whole.protocol, [pi, *bar], whole.records, 64)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in str(part).splitlines() if "│" in line]
    assert ["pi", "7.39", "-"] in rows
    assert "pi - truncate at 64: -0.500 nats" in str(part)
    line = part.plot().axes[0].get_lines()[0]
    assert list(line.get_ydata()) == pytest.approx([math.exp(2)])


def test_options_of_an_arm_are_printed() -> None:
    found = report({"rerope": 2.0})
    found.records["rerope"] = {"method": "rerope", "factor": 2.0, "options": {"window": 128, "logn": True}}
    assert "rerope: factor 2.0, window 128, logn True" in str(found)


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
@pytest.mark.parametrize("arms", [1, 5])
def test_plot_is_written_as_its_suffix_says(tmp_path: Path, suffix: str, arms: int) -> None:
    path = tmp_path / f"plot{suffix}"
    report({name: 2.0 + index for index, name in enumerate(["pi", "truncate", "yarn", "ntk", "none"][:arms])}).plot(
        path
    )
    magic = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix]
    assert path.read_bytes().startswith(magic)


def test_plot_shows_every_arm_and_the_trained_length() -> None:
    axes = report({"pi": 2.0, "truncate": 2.5, "window": 2.25, "none": 4.0}).plot().axes[0]
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert {"pi", "truncate", "window", "none"} <= set(lines)
    assert lines["pi"].get_ydata() == pytest.approx([math.exp(2), math.exp(3)])
    assert lines["pi"].get_linestyle() == "-"
    assert lines["truncate"].get_linestyle() == lines["none"].get_linestyle() == "--"
    assert lines["window"].get_linestyle() == ":"
    assert [text.get_text() for text in axes.texts] == ["trained length 64"]
    assert axes.get_xlabel() == "context length (tokens)"
    assert axes.get_ylabel() == "perplexity of the last 10 tokens"


@pytest.mark.parametrize("count", [6, 9, 12])
def test_no_two_arms_of_a_plot_look_alike(count: int) -> None:
    arms = [*(f"method {index}" for index in range(count)), "truncate", "window", "none"]
    lines = [line for line in report(dict.fromkeys(arms, 2.0)).plot().axes[0].get_lines() if line.get_label() in arms]
    assert len({(line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines}) == len(arms)


def test_plot_touches_no_global_state() -> None:
    import matplotlib.pyplot as plt

    report({"pi": 2.0}).plot()
    assert plt.get_fignums() == []


def test_same_figure_same_svg(tmp_path: Path) -> None:
    report({"pi": 2.0}).plot(tmp_path / "one.svg")
    report({"pi": 2.0}).plot(tmp_path / "other.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "other.svg").read_bytes()


def test_another_suffix_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"one of .png, .svg, .pdf, got .*plot.bmp"):
        report({"pi": 2.0}).plot(tmp_path / "plot.bmp")
