"""Every rotary architecture that the installed transformers can make, as a tiny random model that runs on text."""

import copy
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import nn

from tests.shrink import FIRST_TEXT_TOKEN, HEAD_WIDTH, INITIALIZER_RANGE, shrunken

LENGTH = 16
MAX_PARAMETERS = 8_000_000
HEADS_IN_ORDER = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)
"""Where transformers lists its model classes, best head first."""


class CannotBuildError(RuntimeError):
    """No tiny model of an architecture can be made here that runs on text alone; the message is the reason."""


def model_types() -> list[str]:
    """Every architecture name that transformers knows."""
    from transformers import CONFIG_MAPPING

    return sorted(CONFIG_MAPPING.keys())


def rotary_candidates() -> list[str]:
    """The architectures that may rotate, by the source of their classes: the others need not be built to know."""
    return [name for name in model_types() if any(map(_mentions_rotation, _possible_classes(name)))]


def reads_text(model_type: str) -> bool:
    """Whether the architecture as a whole takes token ids, not pictures or sound alone."""
    return any("input_ids" in inspect.signature(cls.forward).parameters for cls in _possible_classes(model_type)[:1])


def _possible_classes(model_type: str) -> list[Any]:
    from transformers import CONFIG_MAPPING

    try:
        return [cls for _, cls in _candidates(model_type, CONFIG_MAPPING[model_type])]
    except Exception:  # defaults that are refused, classes that need other packages: `build` says so by name
        return []


def _mentions_rotation(cls: type) -> bool:
    return re.search(r"inv_freq|[Rr]otary", _source(cls.__module__)) is not None


@cache
def _source(module: str) -> str:
    return inspect.getsource(sys.modules[module])


def build(model_type: str, seed: int = 0) -> Any:
    """A random tiny model of one architecture that has run on text: float32, evaluation mode, the same for each seed.

    A composite whose whole cannot be made or wants pictures or sound is represented by its text part.

    Raises:
        CannotBuildError: Where no model can be made, with the reason.
    """
    from transformers import CONFIG_MAPPING

    reason = "transformers maps no model class to it"
    try:
        candidates = list(_candidates(model_type, CONFIG_MAPPING[model_type]))
    except Exception as error:  # configurations whose defaults are refused, classes that need other packages
        raise CannotBuildError(one_line(error)) from error
    for config, cls in candidates:
        try:
            model = _random_model(cls, shrunken(config()), seed)
            logits(model)
            return model
        except Exception as error:  # whatever a foreign constructor raises is the reason why it is not in the sweep
            reason = one_line(error)
    raise CannotBuildError(reason)


def one_line(error: Exception) -> str:
    """What an error says, short enough for a table."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 160, placeholder=" ...")


def _candidates(model_type: str, config_class: Any) -> Iterator[tuple[Any, Any]]:
    """Pairs of a configuration class and a model class: the whole first, then its text part."""
    classes = model_classes(model_type)
    text_class = type(config_class().get_text_config(decoder=True))
    whole = [cls for cls in classes if cls.config_class is not text_class or text_class is config_class]
    text = [cls for cls in [*classes, *model_classes(text_class.model_type)] if cls.config_class is text_class]
    yield from ((config_class, cls) for cls in whole[:1])
    yield from ((text_class, cls) for cls in text[:1] if text_class is not config_class)


def model_classes(model_type: str) -> list[Any]:
    """The classes that transformers has for `model_type`, best head first."""
    import transformers
    from transformers.models.auto import modeling_auto

    names: list[str] = []
    for mapping in HEADS_IN_ORDER:
        entry = getattr(modeling_auto, mapping).get(model_type, ())
        names += [entry] if isinstance(entry, str) else entry
    found = [getattr(transformers, name, None) for name in dict.fromkeys(names)]
    return [cls for cls in found if hasattr(cls, "config_class")]


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


def text_inputs(model: Any, spread: bool = False) -> dict[str, Any]:
    """Text for any architecture. Its last token is masked: a mask of ones is dropped by some models, and without a mask
    gapped positions are taken for packed documents.

    Args:
        model: the model that is to read it.
        spread: put a masked token behind each token, so that token i stands at position 2i whatever the model makes
            its positions from.
    """
    accepted = inspect.signature(model.forward).parameters
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(FIRST_TEXT_TOKEN, vocabulary // 2), vocabulary, (2, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[:, -1] = 0
    if spread:
        ids = ids.repeat_interleave(2, dim=1)
        mask = torch.stack([mask, torch.zeros_like(mask)], dim=2).flatten(1)
    inputs = {"input_ids": ids, "decoder_input_ids": ids, "attention_mask": mask, "use_cache": False}
    passed_on = {"attention_mask", "use_cache"} if "kwargs" in accepted else set()
    return {name: value for name, value in inputs.items() if name in {"input_ids", *accepted, *passed_on}}


@torch.no_grad()
def logits(model: Any, positions: torch.Tensor | None = None, spread: bool = False) -> torch.Tensor:
    """What the model says to the text [B, L - 1, V], at its own positions, at given ones [L] or at every other one."""
    inputs = text_inputs(model, spread)
    if positions is not None:
        inputs |= {name: positions[None].expand(2, -1) for name in position_arguments(model)}
    with torch.random.fork_rng():
        torch.manual_seed(0)  # some draw noise in their forward
        output = model(**inputs)
    found = getattr(output, "logits", None)
    found = output[0] if found is None else found
    return found[:, : -1 - spread : 1 + spread]


def position_arguments(model: Any) -> list[str]:
    """The arguments of `forward` that may take positions."""
    accepted = inspect.signature(model.forward).parameters
    named = [name for name in ("position_ids", "decoder_position_ids") if name in accepted]
    return named or (["position_ids"] if "kwargs" in accepted else [])


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
