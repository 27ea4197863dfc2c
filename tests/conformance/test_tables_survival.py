"""Invariant 9 for tables of positions: copies, casts, loading, initialisation, adapters, training, compilation."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, remove_hook_from_module
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from hf_posext import PatchError, load_pretrained, patch_model, record_of, unpatch_model, write_record
from tests.copies import through_pickle, through_torch_save
from tests.dynamic import assert_close, text
from tests.snapshots import differences, snapshot
from tests.tables import (
    CORE,
    FAMILIES,
    LEARNED,
    N,
    T,
    loss_of,
    make,
    named,
    patch,
    patched_model,
    read,
    shared_model,
    shared_unpatched,
    tables_of,
)

KEPT = named([("bert", "sinusoidal"), ("gpt2", "pi_dynamic"), ("xglm", "pi"), ("m2m_100", "pi_dynamic")])
"""Cases in which something is kept that a cast or a load could spoil: a formula, or a second table."""


@pytest.mark.parametrize(("row", "kind"), CORE)
def test_copies_are_patched_and_go_their_own_way(row: str, kind: str) -> None:
    model, plain = patched_model(row, kind), read(shared_unpatched(row), text(N))
    long, short = read(model, text(T)), read(model, text(N))
    copies = [duplicate(model) for duplicate in (copy.deepcopy, through_pickle, through_torch_save)]
    unpatch_model(model)
    assert torch.equal(read(model, text(N)), plain)
    for copied in copies:
        assert torch.equal(read(copied, text(T)), long)
        assert torch.equal(read(copied, text(N)), short)
        assert torch.equal(read(unpatch_model(copied), text(N)), plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("row", "kind"), CORE)
def test_a_model_that_is_cast_is_rounded_once(row: str, kind: str, dtype: torch.dtype) -> None:
    """Each new row is that of the exact table, rounded; weights made in float32 are rounded a second time at most."""
    model = patched_model(row, kind).to(dtype)
    exact = tables_of(shared_model(row, kind))
    assert [torch.equal(found, table.to(dtype)) for found, table in zip(tables_of(model), exact, strict=True)] == [
        True
    ] * len(exact)
    found = read(model, text(T))
    assert found.dtype is dtype
    assert found.isfinite().all()
    with pytest.raises(ValueError, match=f"{T}"):
        read(model, text(T + 1))


@pytest.mark.parametrize(("row", "kind"), KEPT)
def test_what_is_no_weight_survives_casts_back_and_forth(row: str, kind: str) -> None:
    model = patched_model(row, kind)
    exact = tables_of(model)
    model.bfloat16().half().float()
    if kind != "pi_dynamic" or row not in LEARNED:  # weights are rounded as ever
        assert [torch.equal(*each) for each in zip(tables_of(model), exact, strict=True)] == [True] * len(exact)
    unpatch_model(model)
    for found, expected in zip(tables_of(model), tables_of(shared_unpatched(row)), strict=True):
        assert torch.equal(found, expected) or torch.equal(found, expected.bfloat16().half().float())


@pytest.mark.parametrize(("row", "kind"), CORE)
def test_a_model_that_was_loaded_in_half_precision_is_patched_in_it(row: str, kind: str) -> None:
    half = make(row).bfloat16()
    before = snapshot(half, 0)
    patch(half, kind)
    assert read(half, text(T)).dtype is torch.bfloat16
    assert differences(before, snapshot(unpatch_model(half), 0)) == []


@pytest.mark.parametrize(("row", "kind"), CORE)
def test_a_patched_model_is_emptied_and_filled_again(row: str, kind: str) -> None:
    model = patched_model(row, kind)
    long, short = read(model, text(T)), read(model, text(N))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    rest = {name: value.clone() for name, value in model.named_buffers() if name not in state}
    model.to("meta")
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    tables = [path for path in FAMILIES[row].tables if kind != "pi_dynamic" or row in LEARNED]
    for name, value in rest.items():  # as transformers does with what is in no checkpoint, but for what we keep
        if name.rpartition(".")[0] not in tables:
            model.get_buffer(name).copy_(value)
    assert torch.equal(read(model, text(T)), long)
    assert torch.equal(read(model, text(N)), short)
    if row in LEARNED:
        assert torch.equal(read(unpatch_model(model), text(N)), read(shared_unpatched(row), text(N)))


@pytest.mark.parametrize("row", LEARNED)
def test_a_table_on_meta_has_no_values_to_patch(row: str) -> None:
    plain = shared_unpatched(row)
    with torch.device("meta"):
        model = type(plain)(plain.config)
    with pytest.raises(PatchError, match=r"meta device.*Load the weights before patching"):
        patch_model(model, "tile", 2)


@pytest.mark.parametrize(("row", "kind"), CORE)
def test_weight_initialisation_leaves_the_table(row: str, kind: str) -> None:
    model = patched_model(row, kind)
    before = tables_of(model)
    model.init_weights()
    for module in model.modules():
        model._init_weights(module)
    for found, expected in zip(tables_of(model), before, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("row", "kind"), CORE)
def test_loading_its_own_state_dict_changes_nothing(row: str, kind: str) -> None:
    model = patched_model(row, kind)
    before = snapshot(model, 0)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    assert differences(before, snapshot(model, 0)) == []


@pytest.mark.parametrize("row", ["bert", "bart"])
def test_other_rows_that_are_loaded_do_not_replace_a_formula(row: str) -> None:
    model = patched_model(row, "sinusoidal")
    expected = tables_of(model)
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    read(model, text(N))
    assert [torch.equal(*each) for each in zip(tables_of(model), expected, strict=True)] == [True] * len(expected)


WITH_LINEARS = named(
    [("bert", "tile_frozen"), ("gpt2", "pi_dynamic"), ("opt", "pi"), ("bart", "pi"), ("bert", "sinusoidal")]
)


def wrapped(model: Any, **changes: Any) -> Any:
    """The model under an adapter that is not the identity."""
    torch.manual_seed(0)
    plain = "GPT2" in type(model).__name__
    targets = ["c_attn"] if plain else "all-linear"
    config = LoraConfig(r=2, init_lora_weights=False, target_modules=targets, fan_in_fan_out=plain, **changes)
    return get_peft_model(model, config).eval()


@pytest.mark.parametrize(("row", "kind"), WITH_LINEARS)
def test_an_adapter_may_come_before_or_after(row: str, kind: str) -> None:
    after, before = wrapped(patched_model(row, kind)), patch(wrapped(make(row)), kind)
    expected = read(before, text(T))
    assert record_of(after) == record_of(before)
    assert torch.equal(read(after, text(T)), expected)
    assert torch.equal(read(unpatch_model(before), text(N)), read(wrapped(make(row)), text(N)))
    assert_close(read(after.merge_and_unload(), text(T)), expected, 1e-3)


@pytest.mark.parametrize("kind", ["tile", "tile_frozen", "pi_dynamic"])
def test_the_table_may_be_trained_and_saved_beside_an_adapter(kind: str, tmp_path: Path) -> None:
    """`modules_to_save` makes a copy of the table, which is then the one in force."""
    make("gpt2").save_pretrained(tmp_path / "base")
    model = wrapped(patch(load_pretrained(tmp_path / "base"), kind), modules_to_save=["wpe"]).train()
    before = read(model, text(T))
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.1)
    loss_of(model).backward()
    optimizer.step()
    found = read(model.eval(), text(T))
    assert not torch.equal(found, before)
    model.save_pretrained(tmp_path / "adapter")
    write_record(model, tmp_path / "adapter")
    loaded = load_pretrained(tmp_path / "adapter").eval()
    assert_close(read(loaded, text(T)), found, 1e-5)
    assert_close(read(loaded, text(N)), read(model, text(N)), 1e-5)


@pytest.mark.parametrize(("row", "kind"), WITH_LINEARS)
def test_gradients_are_those_without_checkpointing(row: str, kind: str) -> None:
    model = patched_model(row, kind).train()
    model.config.use_cache = False  # or transformers says that it does not use one
    expected = gradients(model)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    found = gradients(model)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.allclose(expected[name], found[name], rtol=1e-5, atol=1e-6)] == []
    table = {f"{path}.weight" for path in FAMILIES[row].tables}
    assert (table <= expected.keys()) == (kind != "sinusoidal")


def gradients(model: Any) -> dict[str, Tensor]:
    """Gradients of all weights for the same tokens."""
    model.zero_grad()
    loss_of(model).backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


COMPILED = [("bert", "sinusoidal"), ("gpt2", "pi_dynamic"), ("opt", "tile_frozen"), ("xglm", "pi")]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("row", "kind"), named(COMPILED))
def test_a_patched_model_compiles_as_one_graph(row: str, kind: str) -> None:
    """Long text and short text of the same shape: with dynamic `pi` the graph itself has to choose."""
    model, counter = patched_model(row, kind), CompileCounter()
    mask = torch.ones(2, T, dtype=torch.int64)
    mask[0, N - 4 :] = 0
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for inputs in ({"attention_mask": torch.ones_like(mask)}, {"attention_mask": mask}):
        expected = read(model, text(T, 2), **inputs)
        assert_close(read(compiled, text(T, 2), **inputs), expected)
    assert counter.frame_count == 1


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_graph_does_not_outlive_the_patch() -> None:
    model = make("bert")
    compiled = torch.compile(model, backend="eager")
    before = read(compiled, text(N))
    patch(model, "pi")
    assert_close(read(compiled, text(N)), read(model, text(N)))
    unpatch_model(model)
    assert_close(read(compiled, text(N)), before)


@pytest.mark.parametrize("order", ["hook first", "patch first"])
@pytest.mark.parametrize(("row", "kind"), named([("gpt2", "pi_dynamic"), ("bert", "tile"), ("opt", "tile_frozen")]))
def test_accelerate_hooks_and_patches_do_not_disturb_each_other(row: str, kind: str, order: str) -> None:
    model, (path,) = make(row), FAMILIES[row].tables
    module, hook = model.get_submodule(path), AlignDevicesHook(execution_device="cpu", io_same_device=True)
    steps: list[Callable[[], Any]] = [lambda: add_hook_to_module(module, hook), lambda: patch(model, kind)]
    for step in steps if order == "hook first" else steps[::-1]:
        step()
    assert torch.equal(read(model, text(T)), read(shared_model(row, kind), text(T)))
    assert torch.equal(read(model, text(N)), read(shared_model(row, kind), text(N)))
    found, expected = gradients(model), gradients(patched_model(row, kind))
    assert torch.equal(found[f"{path}.weight"], expected[f"{path}.weight"])
    unpatch_model(model)
    assert torch.equal(read(model, text(N)), read(shared_unpatched(row), text(N)))
    assert module._hf_hook is hook
    remove_hook_from_module(module)
    assert torch.equal(read(model, text(N)), read(shared_unpatched(row), text(N)))


def test_a_hook_on_every_module_survives() -> None:
    model = make("bart")
    for module in model.modules():
        add_hook_to_module(module, ModelHook())
    patch(model, "pi_dynamic")
    assert torch.equal(read(model, text(T)), read(shared_model("bart", "pi_dynamic"), text(T)))
    assert torch.equal(read(unpatch_model(model), text(N)), read(shared_unpatched("bart"), text(N)))
    assert [name for name, module in model.named_modules() if not hasattr(module, "_hf_hook")] == []


@pytest.mark.parametrize(("row", "kind"), CORE)
def test_shapes_stay_whatever_is_read(row: str, kind: str) -> None:
    model = patched_model(row, kind)
    shapes = {name: value.shape for name, value in [*model.named_buffers(), *model.named_parameters()]}
    for length in (8, T, N):
        read(model, text(length))
    assert {name: value.shape for name, value in [*model.named_buffers(), *model.named_parameters()]} == shapes
