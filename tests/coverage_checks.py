"""Two invariants, asked of one tiny model: `pi` is a division of positions, and `unpatch_model` gives every bit back."""

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from hf_posext import patch_model, unpatch_model
from tests import sweep
from tests.snapshots import same

FACTOR = 2
TOLERANCE = 1e-5
USED_TWICE = {
    "BeamForCausalLM": "the full layers, which do not rotate, scale their queries by position",
    "DeepseekV4ForCausalLM": "positions also bound the windows that are compressed",
}
"""Model classes whose logits depend on positions other than through rotation, and how; their cos and sin are compared."""


@dataclass(frozen=True)
class Finding:
    """What the sweep found about one architecture."""

    architecture: str
    """Name in transformers."""
    model_class: str
    """The class that was built."""
    compared: str
    """What was compared, and how the model was told where its tokens stand."""
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
        name = type(model).__name__
        compared = how_to_compare(model)
        return Finding(architecture, name, compared, tuple(problems_of(model, compared)))


def how_to_compare(model: Any) -> str:
    """Logits at given positions where the model heeds them, else of a spread text; cos and sin where both would mislead."""
    if type(model).__name__ in USED_TWICE:
        return "cos and sin"
    near, far = (sweep.logits(model, factor * torch.arange(sweep.LENGTH)) for factor in (1, FACTOR))
    return "logits, spread text" if same_to(near, far, TOLERANCE) else "logits"


def problems_of(model: Any, compared: str) -> list[str]:
    """Which of the two invariants do not hold, in words."""
    problems = []
    before, expected = picture(model), measured(model, compared, 1)
    if same_to(expected, measured(model, compared, FACTOR), TOLERANCE):
        problems.append("nothing depends on position in the tiny model")
    try:
        patch_model(model, "pi", factor=FACTOR, layers="all")
        if not same_to(measured(model, compared, FACTOR), expected, TOLERANCE):
            problems.append(f"`pi` is not a division of positions by {FACTOR} ({compared})")
    except Exception as error:  # any error is a finding
        problems.append(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    unpatch_model(model)
    after = picture(model)
    changed = [name for name in {**before, **after} if not same(before.get(name), after.get(name))]
    if changed:
        problems.append(f"not restored: {', '.join(changed[:3])}")
    return problems


def measured(model: Any, compared: str, factor: int) -> torch.Tensor:
    """What is compared, with token i at position factor * i."""
    positions = factor * torch.arange(sweep.LENGTH)
    if compared == "cos and sin":
        return sweep.rotations(model, positions)
    if compared == "logits":
        return sweep.logits(model, positions)
    return sweep.logits(model, spread=factor == FACTOR)


def same_to(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    """Equal up to a fraction of the largest value."""
    return bool((one - other).abs().max() <= tolerance * other.abs().max())


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
