"""What the commands share: arguments and how their words are read, loading a MODEL without noise, writing results."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType

from hf_posext.errors import quoted
from hf_posext.reports import TEXT_WIDTH, Report, plain, write_atomically

if TYPE_CHECKING:
    from torch import nn


DEMO = "demo:"

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A folder, a hub id, or demo:llama, demo:gpt_neox, demo:bert.")
]
ContextLengthsOption = Annotated[str, typer.Option(metavar="N,N,...", help="Context lengths in tokens.")]
TextOption = Annotated[
    list[Path] | None,
    typer.Option(help="A .txt file (one document), or .jsonl or .jsonl.gz (one per line); repeatable."),
]
TextColumnOption = Annotated[str, typer.Option(help="Key of the text in a .jsonl file.")]
DocumentsOption = Annotated[int | None, typer.Option(help="Read this many documents at most.")]
StrideOption = Annotated[int | None, typer.Option(help="Protocol sliding: tokens by which the window moves.")]
PrefillChunkOption = Annotated[
    int | None,
    typer.Option("--prefill-chunk-size", help="Tokens fed at a time, with a cache of those before; all if not given."),
]
BatchSizeOption = Annotated[int, typer.Option(help="Windows per forward pass.")]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="CPU threads; as torch chooses if not given.")]
ReportOption = Annotated[Path | None, typer.Option(help="Folder for report.json and plot.png.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Write one JSON document to stdout.")]
MethodOption = Annotated[str | None, typer.Option(help="Patch with this method first; without it, as the model is.")]
FactorOption = Annotated[
    float | None, typer.Option(help="Target length over trained length, >= 1; or give --target-length.")
]
TargetLengthOption = Annotated[int | None, typer.Option(help="Tokens that the model shall read, in place of --factor.")]
LayersOption = Annotated[
    str, typer.Option(help="full: layers with a sliding window stay as they are; all: every layer.")
]
DynamicOption = Annotated[
    bool,
    typer.Option(
        "--dynamic/--no-dynamic",
        help="Let the factor follow the length of the text, so that short text is read as before.",
    ),
]
OptionOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE", help="An option of the method (`posext methods`), the value as JSON; repeatable."
    ),
]


def parse_options(pairs: list[str] | None) -> dict[str, Any]:
    """Method options from KEY=VALUE words; values are JSON where they can be, else strings.

    Raises:
        ValueError: a word without a key or a value, or a key given twice.
    """
    options: dict[str, Any] = {}
    for pair in pairs or []:
        key, equals, text = pair.partition("=")
        if not (key.isidentifier() and equals and text):
            raise ValueError(f"`--option` must be KEY=VALUE, got {pair!r}. For example --option beta_fast=16.")
        if key in options:
            raise ValueError(f"`--option` gives `{key}` twice: {options[key]!r} and {text!r}. Leave one out.")
        try:
            options[key] = json.loads(text)
        except json.JSONDecodeError:
            options[key] = text
    return options


def patch_arguments(
    factor: float | None, target_length: int | None, dynamic: bool, option: list[str] | None
) -> dict[str, Any]:
    """What a command line says of a patch, as arguments of `patch_model`; what it leaves out is not among them.

    Raises:
        ValueError: an option that cannot be read, or that has a word of its own which is given too.
    """
    words = given({"factor": factor, "target_length": target_length, "dynamic": dynamic or None})
    options = parse_options(option)
    for name in words.keys() & options:
        raise ValueError(
            f"`{name}` is given twice: {words[name]!r} and {options[name]!r}. Leave `--option {name}` out."
        )
    return words | options


def check_method(method: object, arguments: Mapping[str, Any]) -> None:
    """Refuses what belongs to a method where there is none.

    Raises:
        ValueError: names the words that belong to one.
    """
    if arguments and not method:
        raise ValueError(
            "`--factor`, `--target-length`, `--dynamic` and `--option` belong to a method. Give --method as well."
        )


def parse_lengths(text: str) -> list[int]:
    """Whole numbers between commas.

    Raises:
        ValueError: anything else.
    """
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(
            f"`--context-lengths` must be whole numbers between commas, got {text!r}. For example 256,1024."
        ) from None


def parse_names(text: str | None) -> list[str] | None:
    """Words between commas, none for an empty text; None where they were not given."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given; the others keep the defaults of the function."""
    return {name: value for name, value in options.items() if value is not None}


def locate(name: str) -> str:
    """What `from_pretrained` takes for a MODEL.

    Raises:
        ValueError: unknown embedded model.
        FileNotFoundError: a path that is not there.
    """
    from hf_posext.demo import demo_path

    if name.startswith(DEMO):
        return str(demo_path(name.removeprefix(DEMO)))
    looks_like_path = name.startswith((".", "~")) or Path(name).is_absolute() or len(Path(name).parts) > 2
    if looks_like_path and not Path(name).expanduser().is_dir():
        raise FileNotFoundError(f"There is no folder {name!r}. MODEL is {kinds_of_model()}.")
    return str(Path(name).expanduser()) if looks_like_path else name


def kinds_of_model() -> str:
    """What MODEL may be, in words."""
    from hf_posext.demo import demo_names

    return f"a folder with a saved model, a hub id, or one of {quoted(DEMO + name for name in demo_names())}"


def load_model(name: str, **from_pretrained_kwargs: Any) -> nn.Module:
    """A MODEL with its own head and its patch, if it was saved with one, in evaluation mode.

    Raises:
        ValueError, OSError: unknown name, or nothing there that can be loaded.
    """
    from hf_posext.loading import load_pretrained

    path = locate(name)
    try:
        return load_pretrained(path, model_class(path), **from_pretrained_kwargs).eval()
    except OSError as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise OSError(f"{name!r} cannot be loaded: {reason}. MODEL is {kinds_of_model()}.") from error


def model_class(path: str) -> Any:
    """The class that a checkpoint was saved from, so that no head is lost; a causal LM where it does not say."""
    import transformers

    from hf_posext.loading import ADAPTER_CONFIG

    if (Path(path) / ADAPTER_CONFIG).is_file():
        return transformers.AutoModelForCausalLM
    architectures = transformers.AutoConfig.from_pretrained(path).architectures or [""]
    return getattr(transformers, architectures[0], transformers.AutoModelForCausalLM)


def load_tokenizer(name: str) -> Any:
    """The tokenizer beside a MODEL, None where there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(locate(name))
    except (ImportError, OSError, ValueError):  # a tokenizer may want a package that is not here
        return None


@contextmanager
def quiet() -> Iterator[None]:
    """No log lines and no loading bars of the libraries; downloads are shown, and all that matters is in the result."""
    from huggingface_hub import utils as hub
    from transformers.utils import logging as host

    own = logging.getLogger("hf_posext")
    logs: list[tuple[Callable[[int], None], int]] = [
        (own.setLevel, own.level),
        (hub.logging.set_verbosity, hub.logging.get_verbosity()),
        (host.set_verbosity, host.get_verbosity()),
    ]
    loading, downloads = host.is_progress_bar_enabled(), not hub.are_progress_bars_disabled()
    host.disable_progress_bar()
    if downloads:
        hub.enable_progress_bars()
    for set_level, _ in logs:
        set_level(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # between peft and transformers; no news for a user
            yield
    finally:
        if loading:
            host.enable_progress_bar()
        for set_level, level in logs:
            set_level(level)


def show(*parts: RenderableType) -> None:
    """Writes tables and lines to stdout; words in brackets are text, and a plain string is never broken (paths)."""
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = TEXT_WIDTH
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))


def show_report(report: Report, files: Iterable[Path] = (), *, as_json: bool) -> None:
    """Writes a report to stdout, and where it was saved; as one JSON document it is the report alone."""
    if as_json:
        show_json(report.to_dict())
    else:
        show(report, *(f"saved {path}" for path in files))


def show_json(data: Mapping[str, Any]) -> None:
    """Writes one JSON document to stdout."""
    typer.echo(as_json(data))


def as_json(data: Mapping[str, Any]) -> str:
    """Plain data as one JSON document."""
    return json.dumps(plain(data), indent=2, allow_nan=False, ensure_ascii=False)


def write_report(report: Any, data: Mapping[str, Any], out: Path) -> list[Path]:
    """Writes the data and the plot of a report that has one into a folder, as report.json and plot.png."""
    out.mkdir(parents=True, exist_ok=True)
    written = [out / "report.json", out / "plot.png"]
    write_atomically(written[0], as_json(data) + "\n")
    report.plot(written[1])
    return written
