"""The loss against transformers' own `labels=`: numbers, gradients, precision, and how much of the logits is held."""

import copy
import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hf_posext
from hf_posext.compat import quiet
from hf_posext.training.loss import loss_without_logits
from tests import tables
from tests.architectures import VOCABULARY, tiny_inputs, tiny_model
from tests.mechanisms.alibi_models import tiny as tiny_alibi

LENGTH = 24
IGNORED = -100
MODELS: dict[str, Callable[[], Any]] = {
    **{row: functools.partial(tiny_model, row) for row in ("llama", "gpt_neox", "gemma2", "cohere", "modernbert")},
    **{row: functools.partial(tables.make, row) for row in ("gpt2", "opt", "bert", "distilbert")},
}
PATCHED: dict[str, Callable[[], Any]] = {
    "yarn": lambda: hf_posext.patch_model(tiny_model("llama"), "yarn", 4),
    "yarn_dynamic": lambda: hf_posext.patch_model(tiny_model("llama"), "yarn", 4, dynamic=True),
    "self_extend": lambda: hf_posext.patch_model(tiny_model("llama"), "self_extend", 4),
    "alibi": lambda: hf_posext.patch_model(tiny_model("gpt_neox"), "alibi", 4),
    "alibi_learned": lambda: hf_posext.patch_model(tiny_model("llama"), "alibi", 4, learned=True),
    "native_alibi_dynamic": lambda: hf_posext.patch_model(tiny_alibi("bloom"), "pi", 4, dynamic=True),
    "table_dynamic": lambda: tables.patched_model("gpt2", "pi_dynamic"),
    "encoder_table_dynamic": lambda: tables.patched_model("bert", "pi_dynamic"),
}


def text(length: int = LENGTH, *, seed: int = 0) -> dict[str, Tensor]:
    """Two rows, of which the second begins with padding; some tokens have no label, in each row others."""
    inputs = tiny_inputs(length, seed=seed)
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, :5] = 0
    labels = inputs["input_ids"].clone()
    labels[0, 3:9] = labels[1, :7] = labels[1, -2:] = IGNORED
    return {"input_ids": inputs["input_ids"], "attention_mask": mask, "labels": labels}


def step(model: nn.Module, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a forward, and the gradients of all that it trains."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def stock_step(model: nn.Module, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """As `step`; some classes log that transformers picks their loss by itself."""
    with quiet():
        return step(model, **inputs)


def own_step(model: nn.Module, *, chunk: int, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """As `step`, with the loss that is tested."""
    with loss_without_logits(model, chunk=chunk):
        return step(model, **inputs)


def assert_same(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
    largest = max(float(gradient.abs().max()) for gradient in expected[1].values())
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=2e-6 * largest)


@pytest.mark.parametrize("chunk", [1, 7, 1024])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_transformers(name: str, chunk: int) -> None:
    model = MODELS[name]()
    assert_same(own_step(model, chunk=chunk, **text()), stock_step(model, **text()))


@pytest.mark.parametrize("chunk", [7, 1024])
@pytest.mark.parametrize("name", PATCHED)
def test_a_patched_model_learns_as_with_its_own_loss(name: str, chunk: int) -> None:
    model = PATCHED[name]()
    length = 40 if name.startswith("native") else tables.N + LENGTH  # beyond N, where the patch does something
    expected = stock_step(model, **text(length))
    assert_same(own_step(model, chunk=chunk, **text(length)), expected)
    unpatched = stock_step(hf_posext.unpatch_model(copy.deepcopy(model)), **text(LENGTH))
    assert not torch.equal(unpatched[0], expected[0])


def test_labels_that_the_model_does_not_shift_are_not_shifted() -> None:
    config = transformers.XLNetConfig(
        vocab_size=VOCABULARY, d_model=32, n_layer=1, n_head=2, d_inner=32, dropout=0.0, initializer_range=0.3
    )
    model = transformers.XLNetLMHeadModel(config).eval()
    assert_same(own_step(model, chunk=7, **text()), stock_step(model, **text()))


def test_other_arguments_reach_the_model() -> None:
    model = MODELS["bert"]()
    inputs = {**text(), "token_type_ids": torch.randint(0, 2, (2, LENGTH)), "position_ids": torch.arange(LENGTH)[None]}
    inputs["position_ids"] = inputs["position_ids"].flip(-1)
    expected = stock_step(model, **inputs)
    assert_same(own_step(model, chunk=7, **inputs), expected)
    assert not torch.equal(stock_step(model, **text())[0], expected[0])


def test_embeddings_in_place_of_ids_are_read() -> None:
    model = MODELS["llama"]()
    embedded = {**text(), "inputs_embeds": model.get_input_embeddings()(text()["input_ids"]).detach()}
    del embedded["input_ids"]
    assert_same(own_step(model, chunk=7, **embedded), stock_step(model, **embedded))


@pytest.mark.parametrize("count", [50, torch.tensor(50)], ids=["int", "tensor"])
def test_a_count_that_is_given_divides_the_sum(count: int | Tensor) -> None:
    model = MODELS["llama"]()
    labels = int((text()["labels"][:, 1:] != IGNORED).sum())
    loss, _ = own_step(model, chunk=7, num_items_in_batch=count, **text())
    torch.testing.assert_close(loss, stock_step(model, **text())[0] * labels / 50, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.parametrize("chunk", [7, 1024])
def test_without_a_label_the_loss_is_0_and_every_parameter_gets_a_gradient(name: str, chunk: int) -> None:
    model = MODELS[name]()
    expected = stock_step(model, **text())[1]
    loss, gradients = own_step(model, chunk=chunk, **{**text(), "labels": torch.full((2, LENGTH), IGNORED)})
    assert loss == 0
    assert gradients.keys() == expected.keys()
    assert all(bool((gradient == 0).all()) for gradient in gradients.values())


def test_a_forward_without_labels_is_the_models_own() -> None:
    model = MODELS["llama"]()
    inputs = tiny_inputs(LENGTH)
    with loss_without_logits(model):
        found = model(**inputs)
    assert torch.equal(found.logits, model(**inputs).logits)
    assert found.keys() == model(**inputs).keys()


def test_a_loss_is_all_that_is_returned() -> None:
    model = MODELS["llama"]()
    with loss_without_logits(model), torch.no_grad():
        assert list(model(**text())) == ["loss"]


class LargestLogits(TorchDispatchMode):
    """The number of rows of the largest tensor over the vocabulary that any operation makes."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.shape[-1:] == (VOCABULARY,) and func._schema.name != "aten::t":
            self.rows = max(self.rows, result.numel() // VOCABULARY)
        return result


def frozen(name: str) -> Any:
    """A model whose head and embeddings are not trained, so that no gradient has the width of the vocabulary."""
    model = MODELS[name]()
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        module.requires_grad_(False)
    return model


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "distilbert"])
def test_no_more_rows_of_logits_than_a_chunk_are_made_forward_and_backward(name: str) -> None:
    model = frozen(name)
    with LargestLogits() as held:
        own_step(model, chunk=5, **text())
    with LargestLogits() as stock:
        stock_step(model, **text())
    assert (held.rows, stock.rows) == (5, 2 * LENGTH)


class Rows(list[int]):
    """Rows that a module has read, call by call."""

    def __init__(self, module: nn.Module) -> None:
        module.register_forward_hook(lambda module, inputs, output: self.append(output[0].shape[:-1].numel()))


@pytest.mark.parametrize(("chunk", "times"), [(5, 2), (1024, 1)])
def test_the_head_reads_rows_with_a_label_only_and_twice_where_there_are_several_chunks(chunk: int, times: int) -> None:
    model = MODELS["llama"]()
    with loss_without_logits(model, chunk=chunk):
        seen: list[int] = []
        model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output[0].shape[0]))
        step(model, **text())
    assert max(seen) <= chunk
    assert sum(seen) == times * int((text()["labels"][:, 1:] != IGNORED).sum())


def test_the_backbone_and_its_hooks_run_once_with_dropout_as_ever() -> None:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3, bos_token_id=1, eos_token_id=2
    )
    model = transformers.GPT2LMHeadModel(config).train()
    torch.manual_seed(1)
    expected = stock_step(model, **text())
    with loss_without_logits(model, chunk=5):
        backbone, layer = Rows(model.transformer), Rows(model.transformer.h[0])
        torch.manual_seed(1)
        found = step(model, **text())
    assert_same(found, expected)
    assert (len(backbone), len(layer)) == (1, 1)
    assert not torch.equal(stock_step(model, **text())[0], expected[0])  # there is dropout


def by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean NLL from logits in their own precision, by log-softmax in fp32 and a sum in float64."""
    logarithms = torch.log_softmax(logits[:, :-1].float(), dim=-1)
    targets = labels[:, 1:]
    picked = logarithms.gather(-1, targets.clamp(min=0)[..., None])[..., 0].double()
    return (-picked[targets != IGNORED].mean()).float()


@pytest.mark.parametrize("chunk", [7, 1024])
@pytest.mark.parametrize("autocast", [False, True], ids=["weights", "autocast"])
def test_report_096_the_loss_of_bf16_logits_is_in_fp32(autocast: bool, chunk: int) -> None:
    model = MODELS["llama"]()
    model = model if autocast else model.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with torch.no_grad():
            logits = model(input_ids=text()["input_ids"], attention_mask=text()["attention_mask"]).logits
        loss, gradients = own_step(model, chunk=chunk, **text())
    assert (logits.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(loss, by_hand(logits, text()["labels"]), rtol=1e-6, atol=0)
    assert loss != loss.to(torch.bfloat16).float()
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32 if autocast else torch.bfloat16}


class Mixing(transformers.LlamaForCausalLM):
    """Logits of a position depend on the hidden states of others, so no row can be read alone."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        logits = super().forward(input_ids, **kwargs).logits.cumsum(dim=1)
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=VOCABULARY)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def test_a_head_that_mixes_positions_keeps_its_logits_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Mixing(MODELS["llama"]().config).eval()
    expected = stock_step(model, **text())
    with caplog.at_level(logging.INFO, "hf_posext"):
        caplog.clear()
        found = own_step(model, chunk=7, **text())
    assert_same(found, expected)
    assert [record.message for record in caplog.records] == [
        "The head of Mixing cannot be run on single rows: its logits are held."
    ]


def test_the_forward_is_the_models_own_again_after_the_block() -> None:
    model = MODELS["llama"]()
    before, parameters = dict(vars(model)), inspect.signature(model.forward).parameters
    with loss_without_logits(model):
        assert inspect.signature(model.forward).parameters == parameters
        assert vars(model) != before
    assert vars(model) == before
    assert "forward" not in vars(model.model)


def test_an_error_leaves_the_model_as_it_was() -> None:
    model = MODELS["llama"]().train()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}

    def fail(module: nn.Module, inputs: tuple[Tensor]) -> None:
        if inputs[0].shape[1] > 4:
            raise MemoryError("no room")

    handle = model.lm_head.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError), loss_without_logits(model, chunk=8):
        model(**text())
    handle.remove()
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_a_backward_after_the_block_is_right() -> None:
    model = MODELS["llama"]()
    expected = stock_step(model, **text())
    model.zero_grad()
    with loss_without_logits(model, chunk=7):
        loss = model(**text()).loss
    loss.backward()
    assert_same((loss.detach(), {name: each.grad for name, each in model.named_parameters()}), expected)
