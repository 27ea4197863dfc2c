"""Whatever the default dtype and device, whether compiled or not, the functions give the same numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_posext import functional
from tests.test_lean_import import heavy_after

TABLE = torch.linspace(-1, 1, 12).view(4, 3)
CALLS: dict[str, Callable[[], Tensor]] = {
    "alibi_slopes": lambda: functional.alibi_slopes(6),
    "apply_rotary": lambda: functional.apply_rotary(TABLE, TABLE[:, :1].contiguous()),
    "hierarchical_table": lambda: functional.hierarchical_table(TABLE, 16),
    "interpolate_table": lambda: functional.interpolate_table(TABLE, 10, mode="cubic"),
    "relative_buckets": lambda: functional.relative_buckets(torch.arange(300, device="cpu") - 150, bidirectional=True),
    "rotary_angles": lambda: functional.rotary_angles(3_002, 8),
    "sinusoidal_table": lambda: functional.sinusoidal_table(3_002, 7),
    "tile_table": lambda: functional.tile_table(TABLE, 10),
}


def test_every_function_is_listed_here() -> None:
    assert sorted(CALLS) == sorted(functional.__all__)


@pytest.mark.parametrize("name", CALLS)
def test_a_default_dtype_of_half_precision_changes_nothing(name: str) -> None:
    expected = CALLS[name]()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = CALLS[name]()
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", CALLS)
def test_a_model_built_without_memory_gets_numbers(name: str) -> None:
    with torch.device("meta"):
        found = CALLS[name]()
    assert found.device.type == "cpu"
    assert torch.equal(found, CALLS[name]())


@pytest.mark.parametrize("name", CALLS)
def test_autocast_changes_nothing(name: str) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = CALLS[name]()
    assert torch.equal(found, CALLS[name]())


class Float64Elsewhere(TorchDispatchMode):
    """Operations whose result is float64 on another device than the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.elsewhere = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes what comes out."""
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if torch.is_tensor(leaf) and leaf.device.type != "cpu"]
        self.elsewhere += len(tensors)
        self.seen += [str(func) for leaf in tensors if leaf.dtype == torch.float64]
        return result


@pytest.mark.parametrize(
    "call",
    [
        lambda: functional.rotary_angles(torch.arange(9, device="meta"), 8, factor=2),
        lambda: functional.rotary_angles(torch.arange(9, device="meta"), 8, inv_freq=torch.ones(4).double()),
        lambda: functional.rotary_angles(torch.arange(9, device="meta"), 8, inv_freq=torch.ones(4, device="meta")),
        lambda: functional.apply_rotary(torch.ones(2, 4, device="meta").half(), torch.ones(2, 2, device="meta")),
        lambda: functional.relative_buckets(torch.arange(9, device="meta"), bidirectional=False),
        lambda: functional.tile_table(torch.ones(2, 4, device="meta"), 5),
    ],
)
def test_no_float64_is_made_on_other_devices(call: Callable[[], Tensor]) -> None:
    """Some devices have none. Field report 115."""
    with Float64Elsewhere() as record:
        result = call()
    assert result.device.type == "meta"
    assert record.elsewhere
    assert record.seen == []


def test_the_forward_of_a_model_compiles_in_one_graph(fresh_compiler: None) -> None:
    def forward(states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = functional.rotary_angles(positions, 6, base=500.0, factor=2.0)
        distances = positions[None, :] - positions[:, None]
        buckets = functional.relative_buckets(distances, bidirectional=True)
        return functional.apply_rotary(states, angles, layout="interleaved"), buckets

    states, positions = torch.randn(2, 9, 8), torch.arange(40, 49)
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    for found, expected in zip(compiled(states, positions), forward(states, positions), strict=True):
        assert torch.equal(found, expected)


def test_importing_the_functions_does_not_load_transformers() -> None:
    assert heavy_after("import hf_posext.functional") == {"torch", "numpy"}
