"""Two invariants of one tiny model: `pi` is a division of positions, and `unpatch_model` gives every bit back."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hf_posext import patch_model, unpatch_model
from hf_posext.lengths import trained_length
from tests import sweep
from tests.architectures import TRAINED_LENGTH
from tests.snapshots import same

FACTOR = 2
TOLERANCE = 1e-5
Measure = Callable[[Any, int], torch.Tensor]
WAYS: Mapping[str, Measure] = {
    "logits at given positions": lambda model, step: sweep.logits(model, step * torch.arange(sweep.LENGTH)),
    "logits of a spread text": lambda model, step: sweep.logits(model, spread=step == FACTOR),
}
"""What is compared, with token i at position step * i; the second where a model makes its positions or masks itself."""
ROTATIONS: Mapping[str, Measure] = {
    "cos and sin": lambda model, step: sweep.rotations(model, step * torch.arange(sweep.LENGTH)),
}
USED_TWICE = {
    "BeamForCausalLM": "the full layers, which do not rotate, scale their queries by position",
    "DeepseekV4ForCausalLM": "positions also choose which tokens are compressed together",
}
"""Model classes whose logits depend on positions by more than rotation, and how; their cos and sin are compared."""


@dataclass(frozen=True)
class Finding:
    """What the sweep found about one architecture."""

    architecture: str
    """Name in transformers."""
    model_class: str
    """The class that was built."""
    compared: str
    """In which of the ways `pi` was seen to divide positions; empty where it was not."""
    problems: tuple[str, ...]
    """Why an invariant does not hold; empty where both do."""

    @property
    def holds(self) -> bool:
        """Whether both invariants hold."""
        return not self.problems


def examine(architecture: str) -> Finding | None:
    """Both invariants on a tiny model of one architecture; None where it is not rotary.

    Raises:
        sweep.CannotBuildError: No tiny model can be made of it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what untouched models warn of is not the subject
        model = sweep.build(architecture)
        if not sweep.rotary_modules(model):
            return None
        compared, problems = examined(model)
        return Finding(architecture, type(model).__name__, compared, tuple(problems))


def examined(model: Any) -> tuple[str, list[str]]:
    """The way in which `pi` was seen to divide positions, and what is wrong."""
    ways = ROTATIONS if type(model).__name__ in USED_TWICE else WAYS
    before = picture(model)
    expected = {way: measure(model, 1) for way, measure in ways.items()}
    telling = [way for way, measure in ways.items() if not close(measure(model, FACTOR), expected[way])]
    length: dict[str, Any] = (
        {} if trained_length(model.config) else {"original_max_position_embeddings": TRAINED_LENGTH}
    )
    compared, problems = "", []
    try:
        patch_model(model, "pi", factor=FACTOR, layers="all", **length)
        compared = next((way for way in telling if close(ways[way](model, FACTOR), expected[way])), "")
        if not compared:
            problems.append(f"`pi` is not a division of positions by {FACTOR}")
    except Exception as error:  # any error is a finding
        problems.append(sweep.one_line(error))
    unpatch_model(model)
    after = picture(model)
    changed = [name for name in {**before, **after} if not same(before.get(name), after.get(name))]
    if changed:
        problems.append(f"not restored: {', '.join(changed[:3])}")
    return compared, problems


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal up to a fraction of the largest value."""
    return bool((one - other).abs().max() <= TOLERANCE * other.abs().max())


def picture(model: Any) -> dict[str, Any]:
    """Everything that must come back bit for bit."""
    return {
        "logits": sweep.logits(model),
        "config": model.config.to_json_string(use_diff=False),
        "state-dict keys": list(model.state_dict()),
        **{f"class of {name}": type(module) for name, module in model.named_modules()},
        **{f"parameter {name}": value.detach().clone() for name, value in model.named_parameters()},
        **{f"buffer {name}": value.detach().clone() for name, value in model.named_buffers()},
    }
