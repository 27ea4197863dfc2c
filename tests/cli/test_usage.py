"""The command line as a whole: help, errors on one line, quiet libraries."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import are_progress_bars_disabled
from transformers.utils import logging as transformers_logging

from hf_posext.cli._terminal import parse_options, quiet

RUN = "import sys; from hf_posext.cli import main; sys.exit(main())"
PATCH = ["patch", "demo:llama", "--out", "never"]
EVAL = ["eval", "demo:llama", "--context-lengths"]

# Words -> what the line names, and the next step that it gives.
BAD = {
    "no model": (["inspect"], "'MODEL'", "posext inspect --help"),
    "unknown command": (["inspekt"], "'inspekt'", "posext --help"),
    "unknown option": (["inspect", "demo:llama", "--deep"], "--deep", "posext inspect --help"),
    "unknown demo": (["inspect", "demo:lama"], "'lama'", "Did you mean `llama`?"),
    "no folder": (["inspect", "./nowhere"], "'./nowhere'", "a folder with a saved model"),
    "no hub": (["inspect", "nobody/nothing"], "'nobody/nothing'", "a folder with a saved model"),
    "methods of nothing": (["methods", "./nowhere"], "'./nowhere'", "`demo:llama`"),
    "unknown method": ([*PATCH, "--method", "yarm", "--factor", "2"], "'yarm'", "Did you mean `yarn`?"),
    "no factor": (PATCH, "neither", "factor=2 or target_length=512"),
    "small factor": ([*PATCH, "--factor", "0.5"], "0.5", ">= 1"),
    "no number": ([*PATCH, "--factor", "two"], "'two'", "posext patch --help"),
    "no number, joined": ([*PATCH, "--factor=two"], "'two'", "posext patch --help"),
    "unknown layers": ([*PATCH, "--factor", "2", "--layers", "some"], "'some'", "`full`, `all`"),
    "unknown method option": ([*PATCH, "--factor", "2", "--option", "beta=1"], "'beta'", "`beta_fast`"),
    "no key": ([*PATCH, "--factor", "2", "--option", "beta"], "'beta'", "--option beta_fast=16"),
    "bad lengths": ([*EVAL, "256,x"], "'256,x'", "256,1024"),
    "no such protocol": ([*EVAL, "256", "--protocol", "tale"], "'tale'", "Did you mean `tail`?"),
    "window too wide": (
        [*PATCH, "--method", "self_extend", "--factor", "4", "--option", "window=256"],
        "256",
        "Lower it, or give `group_size`",
    ),
    "no group size": (
        [*PATCH, "--method", "self_extend", "--factor", "4", "--option", "group_size=x"],
        "'x'",
        "`dynamic`, `a whole number`",
    ),
    "no slope": ([*PATCH, "--method", "leaky_rerope", "--factor", "4", "--option", "slope=2"], "got 2", "below 1"),
    "slopes of other heads": (
        [*PATCH, "--method", "alibi", "--factor", "4", "--option", "slopes=[1, 2]"],
        "got 2",
        "so 3 slopes are needed",
    ),
    "dynamic in attention": ([*PATCH, "--method", "rerope", "--factor", "4", "--dynamic"], "`rerope`", "Leave it out"),
    "no such bar": ([*EVAL, "256", "--bars", "trunc"], "'trunc'", "`truncate`"),
    "too long": ([*EVAL, "99999", "--documents", "1"], "99999", "Lower `context_lengths`"),
    "factor without method": ([*EVAL, "256", "--factor", "2"], "--factor", "Give --method"),
    "factor twice": (
        [*EVAL, "256", "--method", "pi", "--factor", "2", "--option", "factor=4"],
        "2.0 and 4",
        "Leave `--option factor` out",
    ),
    "nothing to read": (["eval", "org/model", "--context-lengths", "256"], "nothing to read", "Give --text"),
    "no such text": ([*EVAL, "256", "--text", "gone.txt"], "'gone.txt'", ".jsonl.gz"),
    "no threads": (["demo", "--threads", "0"], "'0'", "posext demo --help"),
    "no such demo": (["demo", "--model", "bert9"], "'bert9'", "Allowed: `bert`, `gpt_neox`, `llama`"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_with_2_and_one_line_that_names_it_and_the_next_step(
    case: str, posext: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words, named, next_step = BAD[case]
    outcome = posext(*words)
    assert (outcome.code, outcome.out) == (2, "")
    (line,) = outcome.err.splitlines()
    assert line.startswith("error: ")
    assert named in line
    assert next_step in line
    assert list(tmp_path.iterdir()) == []


def test_the_process_itself_ends_with_2_and_no_traceback() -> None:
    ended = subprocess.run([sys.executable, "-c", RUN, "inspect", "./nowhere"], capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 1


def test_a_mistake_of_our_own_is_not_passed_off_as_bad_input(posext: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("hf_posext.inspection.list_methods", broken)
    with pytest.raises(KeyError, match="a bug"):
        posext("methods")


@pytest.mark.parametrize("words", [["-h"], ["--help"], []])
def test_help_names_every_command(posext: Any, words: list[str]) -> None:
    outcome = posext(*words)
    assert outcome.code == 0
    assert all(f" {command} " in outcome.out for command in ("demo", "inspect", "methods", "patch", "eval"))


@pytest.mark.parametrize("command", ["demo", "inspect", "methods", "patch", "eval"])
def test_every_command_has_json_and_both_forms_of_help(posext: Any, command: str) -> None:
    short, long = posext(command, "-h"), posext(command, "--help")
    assert short == long
    assert short.code == 0
    assert "--json" in short.out


def test_version_is_that_of_the_package(posext: Any) -> None:
    from importlib.metadata import version

    assert posext("--version").out == f"posext {version('hf_posext')}\n"


@pytest.mark.parametrize(
    ("pair", "value"),
    [
        ("a=1", 1),
        ("a=0.5", 0.5),
        ("a=true", True),
        ("a=null", None),
        ("a=[1, 2.5]", [1, 2.5]),
        ("a=auto", "auto"),
        ('a="1"', "1"),
        ("a=b=c", "b=c"),
    ],
)
def test_option_values_are_json_where_they_can_be(pair: str, value: object) -> None:
    parsed = parse_options([pair])["a"]
    assert parsed == value
    assert type(parsed) is type(value)


def test_an_option_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="`a` twice"):
        parse_options(["a=1", "a=2"])


def test_libraries_are_quiet_inside_and_as_before_outside() -> None:
    def state() -> tuple[object, ...]:
        own = logging.getLogger("hf_posext").level
        bars = transformers_logging.is_progress_bar_enabled(), are_progress_bars_disabled()
        return own, transformers_logging.get_verbosity(), bars

    before = state()
    with quiet():
        assert state() == (logging.ERROR, logging.ERROR, (False, before[2][1]))  # type: ignore[index]
    assert state() == before


def test_stderr_is_empty_where_all_went_well(posext: Any) -> None:
    outcome = posext("inspect", "demo:llama", "--json")
    assert outcome.err == ""
    assert json.loads(outcome.out)
