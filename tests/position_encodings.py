"""How a tiny model encodes position, seen from outside: what it rotates by, and what it computes as it reads a text.

Nothing here asks the package: a table is known by the rows that a forward takes from it, whatever its module is called.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.shrink import HEAD_WIDTH, HEADS
from tests.texts import LENGTH, logits

ROTARY, LEARNED, SINUSOIDAL, ALIBI, RELATIVE_BIAS = "rotary", "learned", "sinusoidal", "alibi", "relative_bias"
TABLES = (LEARNED, SINUSOIDAL)
FEWEST_DISTANCES = 4
SPEAKING = {
    RELATIVE_BIAS: r"rel_shift|relative_shift|relative_position",
    SINUSOIDAL: r"class \w*Sinusoidal",
    LEARNED: r"class \w*Position\w*Embedding",
}
"""What the classes of a model say whose encoding shows in no rows and no distances; first match wins."""
NOT_OF_TEXT = ("BrosPositionalEmbedding1D",)
"""Classes with a spectrum for something else than tokens: here the corners of boxes."""
aten = torch.ops.aten


@dataclass(frozen=True)
class Encodings:
    """What tells a model about positions."""

    mechanisms: frozenset[str]
    """In the words of DESIGN section 2."""
    tables: dict[str, str]
    """Path of each module with a table of positions, and its mechanism: learned or sinusoidal."""
    others: frozenset[str]
    """Paths of modules with tables of which a text took other rows."""
    length: int | None
    """Tokens that the shortest table has rows for, counted from the row that the first token took; None without."""


def encodings(model: nn.Module) -> Encodings:
    """What tells a model about positions as it reads a text.

    A module has a table of positions where a text of L tokens takes L rows of it one after the other, whatever its
    words. There is a `relative_bias` where a matrix of whole numbers is made that depends on distance alone, but for
    models that rotate: these cut off windows by it. Where none of that is seen, the words of the classes decide.
    """
    reading = _Reading(model)
    with bias_builders(model, reading.noting_bias), reading:
        logits(model)
    tables = {name: value for name, value in reading.tables.items() if not _is_head_table(value)}
    runs = {name: int(rows.flatten()[0]) for name, rows in reading.taken if name in tables and _is_run(rows)}
    length = min((len(tables[name]) - first for name, first in runs.items()), default=None)
    found = {_owner(name): SINUSOIDAL if _has_sinusoids(tables[name]) else LEARNED for name in runs}
    rotates = not reading.has_bias and bool(rotary_modules(model))
    flags = {ROTARY: rotates, ALIBI: reading.has_bias, RELATIVE_BIAS: reading.has_distances and not rotates}
    mechanisms = {*found.values(), *(name for name, is_there in flags.items() if is_there)}
    mechanisms = mechanisms or set(_spoken_of(model)[:1])
    others = {_owner(name) for name, _ in reading.taken} - set(found)
    return Encodings(frozenset(mechanisms), found, frozenset(others), length)


class _Reading(TorchDispatchMode):
    """Sees which rows a forward takes from each table of a model, and whether it computes distances.

    Attributes:
        tables: parameters and buffers of two dimensions, by path.
        taken: path of a table and the numbers of the rows that one operation took.
        has_distances: whether there was a matrix of whole numbers by distance.
        has_bias: whether there was a linear bias.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        every = [*model.named_parameters(), *model.named_buffers()]
        self.tables = {name: value for name, value in every if value.ndim == 2 and value.is_floating_point()}
        self.names = {value.data_ptr(): name for name, value in self.tables.items()}
        self.taken: list[tuple[str, torch.Tensor]] = []
        self.has_distances = self.has_bias = False

    def noting_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """The bias as it is."""
        self.has_bias = True
        return bias

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        table = args[0] if args and isinstance(args[0], torch.Tensor) else None
        name = None if table is None or table.ndim != 2 else self.names.get(table.data_ptr())
        if name is not None and table.shape == self.tables[name].shape:
            rows = _rows_taken(func, args)
            self.taken += [] if rows is None else [(name, rows.clone())]
        result = func(*args, **(kwargs or {}))
        self.has_distances |= isinstance(result, torch.Tensor) and _is_by_distance(result)
        return result


def _rows_taken(func: Any, args: Any) -> torch.Tensor | None:
    """Numbers of the rows that an operation takes from its first argument; None for other operations."""
    if func is aten.embedding.default:
        return args[1]
    if func is aten.index_select.default and args[1] == 0:
        return args[2]
    if func is aten.index.Tensor and args[1][0] is not None:
        return args[1][0]
    if func is aten.slice.Tensor and len(args) > 3 and args[1] == 0:
        return torch.arange(*slice(*args[2:4]).indices(len(args[0])))
    return None


def _is_run(rows: torch.Tensor) -> bool:
    """Whether L rows, or L for each text of the batch, follow one another; the last token is masked and may differ."""
    if rows.numel() % LENGTH or rows.numel() > 2 * LENGTH:
        return False
    return bool((rows.reshape(-1, LENGTH)[:, :-1].diff() == 1).all())


def _is_by_distance(numbers: torch.Tensor) -> bool:
    """Whether [..., L, S] whole numbers are the same along each diagonal and not along the other ones."""
    if numbers.is_floating_point() or numbers.ndim < 2 or min(numbers.shape[-2:]) < LENGTH // 2:
        return False
    return torch.equal(numbers[..., 1:, 1:], numbers[..., :-1, :-1]) and len(numbers.unique()) >= FEWEST_DISTANCES


def _has_sinusoids(table: torch.Tensor) -> bool:
    """Whether each row but that of padding has the length of W / 2 pairs of a sine and a cosine."""
    squares = table.detach().square().sum(1)
    return bool(torch.allclose(squares[2:], torch.tensor(table.shape[1] / 2), rtol=1e-4))


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _spoken_of(model: nn.Module) -> list[str]:
    """Mechanisms of which the classes of the parts of a model speak."""
    sources = {_source(type(module)) for module in model.modules()}
    return [name for name, words in SPEAKING.items() if any(re.search(words, source) for source in sources)]


@cache
def _source(cls: type) -> str:
    return inspect.getsource(cls) if cls.__module__.startswith("transformers.models.") else ""


@contextmanager
def bias_builders(model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Changes the linear biases that the model's own file computes, as long as this is open."""
    home = sys.modules[type(model).__module__]
    before = {name: value for name, value in vars(home).items() if re.fullmatch(r"build_\w*alibi\w*", name)}
    for name, function in before.items():
        setattr(home, name, lambda *args, function=function, **kwargs: change(function(*args, **kwargs)))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(home, name, function)


@torch.no_grad()
def with_bias_times(model: nn.Module, factor: int) -> torch.Tensor:
    """The logits of a model that reads with linear biases which its own file computes, times `factor`."""
    with bias_builders(model, lambda bias: factor * bias) if factor != 1 else nullcontext():
        return logits(model)


@torch.no_grad()
def rows_given(model: nn.Module, tables: list[str], spread: bool) -> torch.Tensor:
    """What modules with tables give out for the tokens of a text, all one after the other."""
    given: list[torch.Tensor] = []
    step = 1 + spread

    def note(module: nn.Module, args: Any, output: Any) -> None:
        rows = output[0] if isinstance(output, tuple) else output
        given.append(rows.reshape(-1, step * LENGTH, rows.shape[-1])[:, : -1 - spread : step].flatten())

    hooks = [model.get_submodule(name).register_forward_hook(note) for name in tables]
    try:
        logits(model, spread=spread)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat(given)


@torch.no_grad()
def biases(model: nn.Module, step: int) -> torch.Tensor:
    """What the modules of `BIASES` add to logits of L tokens at positions step * i, all one after the other."""
    given = [
        BIASES[type(module).__name__](module, step) for module in model.modules() if type(module).__name__ in BIASES
    ]
    return torch.cat([each.flatten() for each in given])


def _by_places(module: Any, step: int) -> torch.Tensor:
    places = step * torch.arange(LENGTH)
    return module(_states(1, LENGTH, HEADS, len(module.proj)), places, places).tril()


def _by_distance(module: Any, step: int) -> torch.Tensor:
    places = torch.arange(LENGTH)
    distance = step * (places[:, None] - places)[None, None]
    return module(_states(1, LENGTH, module.linear.in_features), distance, places[None])


def _by_length(module: Any, step: int) -> torch.Tensor:
    segments = torch.zeros(1, step * LENGTH, dtype=torch.long)
    return module(segments, segments, segments, segments)[..., ::step, ::step]


def _states(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


BIASES: Mapping[str, Callable[[Any, int], torch.Tensor]] = {
    "CpmAntSegmentPositionEmbedding": _by_length,
    "InklingRelativeLogits": _by_places,
    **dict.fromkeys(("Inkling2RelativePositionBias", "Inkling2LoopRelativePositionBias"), _by_distance),
}
"""Classes whose biases are asked for without their model, since it mixes neighbours or takes no mask, and how."""


def rotary_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules, by path, that own a rotary spectrum or table and that a text alone makes run."""
    owners = {name: module for name, module in model.named_modules() if _owns_spectrum(module)}
    ran: set[str] = set()
    hooks = [owner.register_forward_hook(lambda *_, name=name: ran.add(name)) for name, owner in owners.items()]
    try:
        logits(model)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: owner for name, owner in owners.items() if name in ran}


@torch.no_grad()
def rotations(model: nn.Module, positions: torch.Tensor) -> torch.Tensor:
    """What all rotary modules with a spectrum per layer type give out at positions [L], one after the other."""
    given = []
    for owner in rotary_modules(model).values():
        for name, _ in owner.named_buffers(recurse=False):
            if "original" not in name:
                given += owner(torch.zeros(1), positions[None], name.removesuffix("_inv_freq"))
    return torch.cat([each.flatten() for each in given])


def _owns_spectrum(module: nn.Module) -> bool:
    """By what the module is: a 1-D spectrum, or a table whose rows are sines and cosines of a head's angles."""
    if type(module).__name__ in NOT_OF_TEXT:
        return False
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point() and buffer.ndim == 1 and re.search(r"(^|_)inv_freq$", name):
            return True
        if buffer.is_floating_point() and buffer.ndim == 2 and _is_head_table(buffer):
            return True
    return isinstance(module, nn.Embedding) and not module.weight.requires_grad and _is_head_table(module.weight)


def _is_head_table(table: torch.Tensor) -> bool:
    """Whether rows hold a sine and a cosine per angle, for no more channels than one head has."""
    if table.shape[1] > HEAD_WIDTH or table.shape[1] % 2:
        return False
    sine, cosine = table.chunk(2, dim=1)
    return bool(torch.allclose(sine**2 + cosine**2, torch.ones(()), atol=1e-5))
