"""The command line `posext`: one module per command. Heavy imports happen in the commands, so that help is instant."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import version
from itertools import pairwise
from typing import Annotated, Any

import typer

from hf_posext.cli import compare, demo, diagnose, evaluate, finetune, inspect, methods, passkey, patch, plot, suggest
from hf_posext.errors import PatchError, TrainingError

BAD_INPUT = 2  # exit code, as for usage errors
FAILED = 1  # of a run that cannot go on
INTERRUPTED = 130
USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]  # of click, which newer typer carries inside

app = typer.Typer(
    name="posext",
    help="Longer contexts for transformers models: inspect, patch, tune, evaluate.",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.run)
app.command("inspect")(inspect.run)
app.command("methods")(methods.run)
app.command("patch")(patch.run)
app.command("eval")(evaluate.run)
app.command("passkey")(passkey.run)
app.command("compare")(compare.run)
app.command("finetune")(finetune.run)
app.command("diagnose")(diagnose.run)
app.command("suggest")(suggest.run)
app.command("plot")(plot.run)


def show_version(asked: bool) -> None:
    """Prints the version of the package and ends."""
    if asked:
        typer.echo(f"posext {version('hf_posext')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Longer contexts for transformers models: inspect, patch, tune, evaluate."""


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line and says on one line of stderr what is wrong with it, if anything is.

    Args:
        arguments: without the name of the program; those of the process if None.

    Returns:
        The exit code: 0, 2 for bad input, 1 for a run that cannot go on.
    """
    arguments = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    known = [registered.name for registered in app.registered_commands]
    command = " ".join(["posext", *(name for name in arguments[:1] if name in known)])
    try:
        return app(arguments, prog_name="posext", standalone_mode=False) or 0
    except USAGE_ERROR as error:
        return refuse(usage_message(error, arguments), command)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        sys.stderr.close()
        return 0
    except (ValueError, TypeError, PatchError, OSError) as error:
        logging.getLogger(__name__).debug("bad input", exc_info=error)
        return refuse(str(error), command)
    except TrainingError as error:
        return refuse(str(error), command, code=FAILED)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED


def usage_message(error: Any, arguments: list[str]) -> str:
    """What is wrong with the words of a command line, with the value where an option could not read its own."""
    message = " ".join(error.format_message().split()).rstrip(".")
    names = getattr(getattr(error, "param", None), "opts", [])
    words = [word for argument in arguments for word in argument.split("=", 1)]
    values = [value for name, value in pairwise(words) if name in names]
    return f"{message}, got {values[-1]!r}." if values else message


def refuse(message: str, command: str, *, code: int = BAD_INPUT) -> int:
    """Writes one line with an error and where to read on; returns the exit code."""
    sentence = " ".join(message.split())
    stop = "" if sentence.endswith((".", "?", "!")) else "."
    typer.echo(f"error: {sentence}{stop} Hint: see `{command} --help`.", err=True)
    return code
