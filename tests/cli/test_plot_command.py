"""`posext plot`: pictures from reports and from models, and one line for what is wrong."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from torch import nn

import hf_posext
from hf_posext.evaluation import plots
from hf_posext.training.result import FinetuneResult
from tests.architectures import tiny_model
from tests.evaluation.test_pictures import curved
from tests.evaluation.test_reports import report
from tests.special_models import gpt2


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Figure, bool]]:
    """The figures that are written, and whether for a dark page; no file is made of them."""
    found: list[tuple[Figure, bool]] = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path, *, dark: found.append((figure, dark)))
    return found


@pytest.fixture
def folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Reports of all kinds, and two saved models."""
    report({"yarn": 2.0, "none": 3.0}).to_json(tmp_path / "yarn.json")
    report({"pi": 2.2, "none": 3.0}).to_json(tmp_path / "pi.json")
    report({"pi": 2.2}, protocol={"digest": "xyz"}).to_json(tmp_path / "others.json")
    curved(yarn=[3.0, 2.0, 1.5], none=[3.0, 2.5, 4.0]).to_json(tmp_path / "curve.json")
    history = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.5}, {"train_runtime": 1.0, "step": 2}]
    metrics = {"steps": 2}
    FinetuneResult(nn.Module(), metrics, tmp_path, history, None, {}).to_json(tmp_path / "run.json")
    evaluation = report({"yarn": 2.0, "none": 3.0})
    FinetuneResult(nn.Module(), metrics, tmp_path, history, evaluation, {}).to_json(tmp_path / "report.json")
    (tmp_path / "text.json").write_text("no report")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "probe.json").write_text('{"cells": [], "protocol": {"probe": "copy"}}')
    tiny_model("llama").save_pretrained(tmp_path / "llama")
    gpt2().save_pretrained(tmp_path / "gpt2")
    capsys.readouterr()  # bars of saving
    return tmp_path


def labels(axes: Any) -> set[str]:
    """The lines of a panel that have a name."""
    return {line.get_label() for line in axes.get_lines() if not line.get_label().startswith("_")}


@pytest.mark.parametrize("dark", [True, False])
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_picture_is_written_as_its_suffix_says(posext: Any, folder: Path, suffix: str, dark: bool) -> None:
    out = folder / f"picture{suffix}"
    outcome = posext("plot", "loss", folder / "curve.json", "--out", out, *(["--dark"] if dark else []))
    assert (outcome.code, outcome.out.strip()) == (0, f"saved {out}")
    assert out.read_bytes().startswith({".png": b"\x89PNG", ".svg": b"<?xml"}[suffix])


def test_json_is_one_document(posext: Any, folder: Path) -> None:
    source, out = str(folder / "curve.json"), str(folder / "a.svg")
    outcome = posext("plot", "loss", source, "--out", out, "--json")
    assert outcome.data == {"kind": "loss", "sources": [source], "out": out}


@pytest.mark.parametrize("dark", [True, False])
def test_reports_of_perplexity_are_joined(
    posext: Any, folder: Path, drawn: list[tuple[Figure, bool]], dark: bool
) -> None:
    words = ["--out", "a.png", *(["--dark"] if dark else [])]
    assert posext("plot", "perplexity", folder / "yarn.json", folder / "pi.json", *words).code == 0
    ((figure, was_dark),) = drawn
    assert labels(figure.axes[0]) == {"yarn", "pi", "none"}
    assert was_dark is dark


@pytest.mark.parametrize(("name", "panels"), [("run.json", 1), ("report.json", 2), (".", 2)])
def test_a_run_shows_its_curve_and_what_was_measured(
    posext: Any, folder: Path, drawn: list[tuple[Figure, bool]], name: str, panels: int
) -> None:
    assert posext("plot", "training", folder / name, "--out", "a.png").code == 0
    ((figure, _),) = drawn
    assert list(figure.axes[0].get_lines()[0].get_ydata()) == [3.0, 2.5]
    assert len(figure.axes) == panels


def test_a_spectrum_shows_several_methods(posext: Any, folder: Path, drawn: list[tuple[Figure, bool]]) -> None:
    words = ["--method", "pi", "--method", "ntk", "--target-length", 128, "--out", "a.png"]
    assert posext("plot", "spectrum", folder / "llama", *words).code == 0
    assert {"as given", "pi x4", "ntk x4"} <= labels(drawn[0][0].axes[0])


@pytest.mark.parametrize(("kind", "name"), [("spectrum", "llama"), ("sinusoids", "gpt2"), ("bias", "llama")])
def test_a_model_is_drawn_as_it_is_without_a_method(
    posext: Any, folder: Path, drawn: list[tuple[Figure, bool]], kind: str, name: str
) -> None:
    assert posext("plot", kind, folder / name, "--out", "a.png").code == 0
    assert len(drawn) == 1


def test_options_and_reach_get_to_the_method(posext: Any, folder: Path, drawn: list[tuple[Figure, bool]]) -> None:
    words = ["--method", "rerope", "--factor", 4, "--option", "window=8", "--reach", 50, "--out", "a.png"]
    assert posext("plot", "bias", folder / "llama", *words).code == 0
    (line,) = [line for line in drawn[0][0].axes[1].get_lines() if line.get_label() == "rerope x4"]
    assert (max(line.get_xdata()), max(line.get_ydata())) == (49, 8)


def test_the_patch_of_a_saved_model_is_drawn(posext: Any, tmp_path: Path, drawn: list[tuple[Figure, bool]]) -> None:
    hf_posext.patch_model(tiny_model("llama"), "pi", 4).save_pretrained(tmp_path)
    assert posext("plot", "spectrum", tmp_path, "--out", "a.png").code == 0
    assert labels(drawn[0][0].axes[0]) == {"as given", "pi x4"}


BAD = {
    "no kind": (["heat", "x"], "'heat'", "Allowed: `perplexity`"),
    "no file": (["loss", "gone.json"], "'gone.json'", "Give a report.json"),
    "no JSON": (["loss", "text.json"], "is not JSON", "that posext wrote"),
    "no object": (["loss", "list.json"], "is a list", "Give a report.json"),
    "no curve": (["loss", "yarn.json"], "last 10 tokens", 'protocol="full"'),
    "no perplexity": (["perplexity", "probe.json"], "not one of perplexity", "`posext eval`"),
    "no perplexity in a run": (["perplexity", "run.json"], "not one of perplexity", "`posext eval`"),
    "no run": (["training", "yarn.json"], "no `history`", "Draw its `perplexity`"),
    "other targets": (["perplexity", "pi.json", "others.json"], "differ in the scored tokens", "one set of documents"),
    "two runs": (["training", "run.json", "run.json"], "got 2", "Draw each by itself"),
    "two models": (["spectrum", "llama", "gpt2"], "got 2", "Draw each by itself"),
    "method of a report": (["loss", "curve.json", "--method", "pi"], "drawn from reports", "Leave out"),
    "factor without method": (["spectrum", "llama", "--factor", "2"], "--factor", "Give --method"),
    "method without factor": (["spectrum", "llama", "--method", "pi"], "neither", "factor=2"),
    "two methods": (["sinusoids", "gpt2", "--method", "pi", "--method", "tile"], "shows one method", "by itself"),
    "reach of a spectrum": (["spectrum", "llama", "--reach", "9"], "--reach", "Leave it out"),
    "no spectrum": (["spectrum", "gpt2"], "no rotary encoding", "Draw its bias or its table"),
    "no profile": (["bias", "gpt2"], "`learned`", "Draw its table"),
    "no model": (["bias", "./nowhere"], "'./nowhere'", "a folder with a saved model"),
    "unknown method": (["bias", "llama", "--method", "yarm", "--factor", "2"], "'yarm'", "Did you mean `yarn`?"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said_on_one_line(
    posext: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    words, named, next_step = BAD[name]
    monkeypatch.chdir(folder)
    outcome = posext("plot", *words, "--out", "a.png")
    assert (outcome.code, outcome.out) == (2, "")
    assert len(outcome.err.splitlines()) == 1
    assert named in outcome.err
    assert next_step in outcome.err
    assert not Path("a.png").exists()


def test_the_suffix_is_looked_at_before_a_model_is_loaded(posext: Any) -> None:
    outcome = posext("plot", "bias", "./nowhere", "--out", "a.gif")
    assert outcome.code == 2
    assert ".png, .svg, .pdf, got 'a.gif'" in outcome.err
