"""Every rotary architecture that the installed transformers can make, as a tiny random model that runs on text alone."""

import copy
import inspect
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import nn

from tests.shrink import FIRST_TEXT_TOKEN, INITIALIZER_RANGE, shrunken

LENGTH = 16
MAX_PARAMETERS = 3_000_000
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
    """No tiny model of an architecture can be made here, or it does not run on text alone; the message is the reason."""


def model_types() -> list[str]:
    """Every architecture name that transformers knows."""
    from transformers import CONFIG_MAPPING

    return sorted(CONFIG_MAPPING.keys())


def build(model_type: str, seed: int = 0) -> Any:
    """A random tiny model of one architecture that has run on text: float32, evaluation mode, the same for each seed.

    A composite whose whole cannot be made or wants pictures or sound is represented by its text part.

    Raises:
        CannotBuildError: Where no model can be made, with the reason.
    """
    from transformers import CONFIG_MAPPING

    reason = "transformers maps no model class to it"
    for config, cls in _candidates(model_type, CONFIG_MAPPING[model_type]):
        try:
            model = _random_model(cls, shrunken(config()), seed)
            logits(model)
            return model
        except Exception as error:  # whatever a foreign constructor raises is the reason why it is not in the sweep
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:140]}"
    raise CannotBuildError(reason)


def _candidates(model_type: str, config_class: Any) -> Iterator[tuple[Any, Any]]:
    """Pairs of a maker of a configuration and a model class: the whole first, then its text part."""
    classes = model_classes(model_type)
    for cls in classes:
        if issubclass(config_class, cls.config_class):
            yield config_class, cls
            break
    text = config_class().get_text_config(decoder=True)
    if type(text) is not config_class:
        for cls in [*classes, *model_classes(text.model_type)]:
            if issubclass(type(text), cls.config_class):
                yield type(text), cls
                break


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
    """Scales up what an architecture initialises to nearly nothing, whatever its settings say; else positions do not show."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or not parameter.is_floating_point():
            continue
        if parameter.ndim >= 2 and parameter.std() < 0.1:
            parameter.normal_(0.0, INITIALIZER_RANGE)
        elif not name.endswith(("weight", "bias")) and parameter.eq(0).all():
            parameter.fill_(1.0)  # gates and temperatures


def text_inputs(model: Any) -> dict[str, Any]:
    """Text for any architecture, with what keeps gapped positions from being taken for packed documents."""
    accepted = inspect.signature(model.forward).parameters
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(FIRST_TEXT_TOKEN, vocabulary // 2), vocabulary, (2, LENGTH), generator=generator)
    inputs = {
        "input_ids": ids,
        "decoder_input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "use_cache": False,
    }
    passes_on = {"attention_mask", "use_cache"} if "kwargs" in accepted else set()
    return {name: value for name, value in inputs.items() if name in accepted or name in passes_on or name == "input_ids"}


@torch.no_grad()
def logits(model: Any, positions: torch.Tensor | None = None) -> torch.Tensor:
    """What the model says to the text, at the default positions or at the given ones [L]."""
    inputs = text_inputs(model)
    if positions is not None:
        for name in position_arguments(model):
            inputs[name] = positions[None].expand(2, -1)
    with torch.random.fork_rng():
        torch.manual_seed(0)  # some draw noise in their forward
        output = model(**inputs)
    found = getattr(output, "logits", None)
    return output[0] if found is None else found


def position_arguments(model: Any) -> list[str]:
    """The arguments of `forward` that take positions."""
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


def _owns_spectrum(module: nn.Module) -> bool:
    """By what the module is: a 1-D spectrum, or a table whose rows are sines and cosines of a head's angles."""
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point() and buffer.ndim == 1 and re.search(r"(^|_)inv_freq$", name):
            return True
        if buffer.ndim == 2 and name == "embed_positions":
            return True
    return isinstance(module, nn.Embedding) and not module.weight.requires_grad and _is_head_table(module.weight)


def _is_head_table(table: torch.Tensor) -> bool:
    """Whether rows hold a sine and a cosine per angle, for fewer channels than a whole hidden state has."""
    sine, cosine = table.chunk(2, dim=1)
    return sine.shape == cosine.shape and sine.shape[1] < 16 and bool(torch.allclose(sine**2 + cosine**2, torch.ones(())))


@cache
def rotary_architectures() -> tuple[str, ...]:
    """The architectures in the sweep: those with a rotary module that runs on text."""
    return tuple(name for name in model_types() if _is_rotary(name))


def _is_rotary(model_type: str) -> bool:
    try:
        return bool(rotary_modules(build(model_type)))
    except CannotBuildError:
        return False
