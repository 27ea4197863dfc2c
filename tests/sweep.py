"""Every architecture with positions that the installed transformers can make, as a tiny random model."""

import copy
import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel

from tests.shrink import INITIALIZER_RANGE, shrunken
from tests.texts import logits

MAX_PARAMETERS = 8_000_000
HEADS_IN_ORDER = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
    "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
)
"""Where transformers lists its model classes, best head first."""
VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "esm, absolute": ("esm", {"position_embedding_type": "absolute"}),
    "falcon, alibi": ("falcon", {"alibi": True}),
    "flaubert, sinusoidal": ("flaubert", {"sinusoidal_embeddings": True}),
    "xlm, sinusoidal": ("xlm", {"sinusoidal_embeddings": True}),
}
"""Other encodings of an architecture than its default: a name -> the architecture and the fields that say so."""
INTERPOLATES = "interpolates its table to the length of each text: no position has a row, and no length is too long"
LEFT_OUT = {
    "vits": "speaks: random weights give minutes of sound to a few tokens",
    "sam3_lite_text": INTERPOLATES,
    "sam3_lite_text_text_model": INTERPOLATES,
}
"""Architectures that are not built, and why."""
ORDER = (
    r"inv_freq|[Rr]otary|alibi|[Ss]inusoid|relative_|rel_pos|wpe\b|pos(ition|itional|itions)?_(embed|emb|enc)|embed_pos"
)
"""What the source of a model says that encodes positions in a way of the field."""


class CannotBuildError(RuntimeError):
    """No tiny model of an architecture can be made here that runs on text alone; the message is the reason."""


def candidates() -> list[str]:
    """The architectures and variants that may be told positions, by the source of their classes: others need not be
    built to know."""
    return sorted([*filter(_may_have_positions, CONFIG_MAPPING.keys()), *VARIANTS])


def reads_text(name: str) -> bool:
    """Whether the architecture as a whole takes token ids, not pictures or sound alone."""
    return any("input_ids" in inspect.signature(cls.forward).parameters for cls in _possible_classes(name)[:1])


def _possible_classes(name: str) -> list[Any]:
    try:
        return [cls for _, cls in _candidates(VARIANTS.get(name, (name, {}))[0])]
    except Exception:  # defaults that are refused, classes that need other packages: `build` says so by name
        return []


def _may_have_positions(model_type: str) -> bool:
    return any(re.search(ORDER, _source(cls.__module__)) for cls in _possible_classes(model_type))


@cache
def _source(module: str) -> str:
    return inspect.getsource(sys.modules[module])


def build(name: str, seed: int = 0) -> Any:
    """A random tiny model of one architecture or variant that has run on text: float32, evaluation mode, the same for
    each seed.

    A composite whose whole cannot be made or wants pictures or sound is represented by its text part.

    Raises:
        CannotBuildError: Where no model can be made, with the reason.
    """
    if name in LEFT_OUT:
        raise CannotBuildError(LEFT_OUT[name])
    reason = "transformers maps no model class to it"
    model_type, settings = VARIANTS.get(name, (name, {}))
    try:
        every = list(_candidates(model_type))
    except Exception as error:  # configurations whose defaults are refused, classes that need other packages
        raise CannotBuildError(one_line(error)) from error
    for config, cls in every:
        try:
            model = _random_model(cls, shrunken(config(), **settings), seed)
            logits(model)
            return model
        except Exception as error:  # whatever a foreign constructor raises is the reason why it is not in the sweep
            reason = one_line(error)
    raise CannotBuildError(reason)


def one_line(error: Exception) -> str:
    """What an error says, short enough for a table."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 160, placeholder=" ...")


def _candidates(model_type: str) -> Iterator[tuple[Any, Any]]:
    """Pairs of a configuration class and a model class: the whole first, then its text part."""
    config_class = CONFIG_MAPPING[model_type]
    classes = model_classes(model_type)
    text_class = type(config_class().get_text_config(decoder=True))
    whole = [cls for cls in classes if cls.config_class is not text_class or text_class is config_class]
    text = [cls for cls in [*classes, *model_classes(text_class.model_type)] if cls.config_class is text_class]
    yield from ((config_class, cls) for cls in whole[:1])
    if text_class is not config_class:
        yield from ((text_class, cls) for cls in (text or unlisted_classes(text_class))[:1])


def model_classes(model_type: str) -> list[Any]:
    """The classes that transformers lists for `model_type`, best head first."""
    import transformers
    from transformers.models.auto import modeling_auto

    names: list[str] = []
    for mapping in HEADS_IN_ORDER:
        entry = getattr(modeling_auto, mapping).get(model_type, ())
        names += [entry] if isinstance(entry, str) else entry
    found = [getattr(transformers, name, None) for name in dict.fromkeys(names)]
    return [cls for cls in found if hasattr(cls, "config_class")]


def unlisted_classes(config_class: Any) -> list[Any]:
    """The classes beside a configuration that read text by it, those with a head first: no list has text parts."""
    package = importlib.import_module(config_class.__module__.rpartition(".")[0])
    names = [info.name for info in pkgutil.iter_modules(package.__path__) if info.name.startswith("modeling_")]
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    every = [cls for module in modules for cls in vars(module).values() if _reads_by(cls, config_class)]
    return sorted(every, key=lambda cls: "LM" not in cls.__name__)


def _reads_by(cls: Any, config_class: Any) -> bool:
    is_model = isinstance(cls, type) and issubclass(cls, PreTrainedModel) and cls.config_class is config_class
    return is_model and "input_ids" in inspect.signature(cls.forward).parameters


def _random_model(cls: Any, config: Any, seed: int) -> Any:
    with torch.device("meta"):
        sizes = {name: value.numel() for name, value in cls(copy.deepcopy(config)).named_parameters()}
    if sum(sizes.values()) > MAX_PARAMETERS:
        raise CannotBuildError(f"{sum(sizes.values())} parameters, most in {max(sizes, key=lambda name: sizes[name])}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = cls(config).eval()
        make_loud(model)
    return model


@torch.no_grad()
def make_loud(model: nn.Module) -> None:
    """Scales up what an architecture initialises to nearly nothing: through that no position would show."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or not parameter.is_floating_point():
            continue
        if parameter.ndim >= 2 and parameter.std() < 0.1:
            parameter.normal_(0.0, INITIALIZER_RANGE)
        elif not name.endswith(("weight", "bias")) and parameter.eq(0).all():
            parameter.fill_(1.0)  # gates and temperatures
