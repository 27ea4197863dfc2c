"""The loss under PEFT, gradient checkpointing, accumulation, Trainer, DDP and the compiler; and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from transformers import Trainer, TrainingArguments

import hf_posext
from hf_posext.gating import gate_adapter, ungate_adapter
from hf_posext.training.loss import loss_without_logits
from tests.architectures import VOCABULARY, tiny_config, tiny_inputs, tiny_model

IGNORED = -100
LENGTH = 48
LORA: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "head_as_well": {"target_modules": ["q_proj", "lm_head"]},
    "head_trained_whole": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens", "norm"]},
}


def batch(*lengths: int, seed: int = 0) -> dict[str, Tensor]:
    """Rows of some lengths, padded on the right."""
    ids = tiny_inputs(max(lengths), batch=len(lengths), seed=seed)["input_ids"]
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask.bool(), IGNORED)}


def part(inputs: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
    """Some rows of a batch."""
    return {name: value[rows] for name, value in inputs.items()}


def gradients(model: nn.Module, *batches: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """Those of the sum of the losses of batches."""
    model.zero_grad()
    for inputs in batches:
        model(**inputs, **options).loss.backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.requires_grad}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 2e-6) -> None:
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=tolerance * largest)


def adapted(kind: str) -> Any:
    torch.manual_seed(0)
    model = hf_posext.patch_model(tiny_model("llama"), "yarn", 4, dynamic=True)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **LORA[kind])).train()


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("chunk", [7, 1024])
@pytest.mark.parametrize("kind", LORA)
def test_report_008_what_peft_trains_gets_the_gradients_of_transformers_own_loss(
    kind: str, chunk: int, checkpointing: bool
) -> None:
    model, inputs = adapted(kind), batch(LENGTH, 30)
    expected = gradients(model, inputs)
    if checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    with loss_without_logits(model, chunk=chunk):
        found = gradients(model, inputs)
    assert_same(found, expected)
    assert all(bool(gradient.any()) for gradient in found.values())


@pytest.mark.parametrize("kind", LORA)
def test_a_gated_adapter_acts_on_the_same_tokens_on_the_head_too(kind: str) -> None:
    model, inputs = gate_adapter(adapted(kind)), batch(LENGTH, 30)
    expected = gradients(model, inputs)
    with loss_without_logits(model, chunk=7):
        found = gradients(model, inputs)
    assert_same(found, expected)
    assert any(bool((found[name] - each).any()) for name, each in gradients(ungate_adapter(model), inputs).items())


def test_an_adapter_that_is_off_is_off() -> None:
    model, inputs = adapted("head_as_well").eval(), batch(LENGTH, 30)
    with torch.no_grad(), model.disable_adapter():
        expected = model(**inputs).loss
        with loss_without_logits(model, chunk=7):
            found = model(**inputs).loss
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert found != model(**inputs).loss


def test_dropout_of_an_adapter_on_the_head_is_the_same_on_the_way_back() -> None:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["lm_head"], lora_dropout=0.5, init_lora_weights=False)
    model, inputs = peft.get_peft_model(tiny_model("llama"), config).train(), batch(LENGTH)
    parameter = next(each for name, each in model.named_parameters() if "lora_B" in name)
    direction = torch.randn(parameter.shape)

    def loss() -> Tensor:
        torch.manual_seed(3)
        return model(**inputs).loss

    with loss_without_logits(model, chunk=7):
        loss().backward()
        with torch.no_grad():
            parameter += 1e-2 * direction
            above = loss()
            parameter -= 2e-2 * direction
            below = loss()
    torch.testing.assert_close((parameter.grad * direction).sum(), (above - below) / 2e-2, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("row", ["llama", "modernbert"])
def test_report_081_gradients_over_accumulated_rows_of_unequal_length_are_those_of_one_batch(row: str) -> None:
    model, inputs = tiny_model(row), batch(48, 9, 30, 3)
    count = (inputs["labels"][:, int(row == "llama") :] != IGNORED).sum()
    with loss_without_logits(model, chunk=16):
        whole = gradients(model, inputs, num_items_in_batch=count)
        alone = gradients(model, inputs)
        pieces = [part(inputs, slice(at, at + 1)) for at in range(4)]
        accumulated = gradients(model, *pieces, num_items_in_batch=count)
    assert_same(alone, whole)
    assert_same(accumulated, whole)


class Unsaid(transformers.LlamaForCausalLM):
    """A class that tells Trainer not to give it the number of labels."""

    accepts_loss_kwargs = False


def trained(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """Parameters after one step of Trainer accumulated over four rows of unequal length."""
    inputs = batch(48, 9, 30, 3)
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=1, gradient_accumulation_steps=4, max_steps=1, learning_rate=1.0,
        optim="sgd", max_grad_norm=0.0, lr_scheduler_type="constant", report_to=[], save_strategy="no",
        disable_tqdm=True, logging_strategy="no", use_cpu=True, dataloader_pin_memory=False,
    )  # fmt: skip
    examples = [{name: value[0] for name, value in part(inputs, slice(at, at + 1)).items()} for at in range(4)]
    Trainer(model, arguments, train_dataset=examples).train()
    return {name: each.detach().clone() for name, each in model.named_parameters()}


@pytest.mark.parametrize("kind", [transformers.LlamaForCausalLM, Unsaid])
def test_report_081_trainer_steps_alike_over_accumulated_rows(kind: type[nn.Module], tmp_path: Path) -> None:
    def fresh(of: type[nn.Module]) -> Any:
        torch.manual_seed(0)
        return of(tiny_config("llama")).train()

    plain = fresh(transformers.LlamaForCausalLM)
    found = gradients(plain, batch(48, 9, 30, 3))  # transformers' own loss of the whole batch
    expected = {name: each.detach() - found[name] for name, each in plain.named_parameters()}  # one step of SGD
    model = fresh(kind)
    with loss_without_logits(model, chunk=16):
        accumulated = trained(model, tmp_path)
    torch.testing.assert_close(accumulated, expected, rtol=1e-5, atol=1e-6)


def test_evaluation_by_trainer_gives_the_loss(tmp_path: Path) -> None:
    model, inputs = tiny_model("llama"), batch(48, 48)
    examples = [{name: value[at] for name, value in inputs.items()} for at in range(2)]
    arguments = TrainingArguments(tmp_path, prediction_loss_only=True, report_to=[], disable_tqdm=True, use_cpu=True)
    with loss_without_logits(model, chunk=7):
        found = Trainer(model, arguments).evaluate(examples)["eval_loss"]
    assert found == pytest.approx(model(**inputs).loss.item(), rel=1e-6)


def test_gradients_under_ddp_are_those_without(tmp_path: Path) -> None:
    model, inputs = adapted("head_trained_whole"), batch(LENGTH, 30)
    expected = gradients(model, inputs)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        with loss_without_logits(model, chunk=7):
            wrapped = nn.parallel.DistributedDataParallel(model)
            found = gradients(wrapped, inputs)
            unlabelled = gradients(wrapped, {**inputs, "labels": torch.full_like(inputs["labels"], IGNORED)})
    finally:
        torch.distributed.destroy_process_group()
    assert_same({name.removeprefix("module."): gradient for name, gradient in found.items()}, expected)
    assert not any(bool(gradient.any()) for gradient in unlabelled.values())


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model_has_the_gradients_of_an_eager_one_and_is_compiled_once_for_all_lengths() -> None:
    torch.manual_seed(0)
    config = tiny_config("llama")
    config.num_hidden_layers = 1
    model = transformers.LlamaForCausalLM(config).train()
    batches = [batch(40, 30), batch(24, 24), batch(33, 2)]
    expected = gradients(model, *batches)
    counter = CompileCounter()
    with loss_without_logits(model, chunk=16):
        found = gradients(torch.compile(model, backend=counter, dynamic=True), *batches)
    assert counter.frame_count == 1
    assert counter.op_count > 50  # the backbone
    assert_same({name.removeprefix("_orig_mod."): gradient for name, gradient in found.items()}, expected, 1e-5)


SMALL = {"vocab_size": VOCABULARY, "d_model": 32, "d_ff": 32, "num_layers": 1, "num_heads": 2, "d_kv": 8}


def prompted() -> nn.Module:
    config = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    return peft.get_peft_model(tiny_model("llama"), config)


class Lossless(transformers.LlamaForCausalLM):
    """Reads labels and makes nothing of them."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, **kwargs)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "encoder-decoder": (
        lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**SMALL)),
        "T5ForConditionalGeneration is an encoder-decoder. Load a decoder-only model or an encoder",
    ),
    "headless": (lambda: tiny_model("llama").model, "LlamaModel has none. Load the model with AutoModelForCausalLM"),
    "prompt": (prompted, "PROMPT_TUNING adapter puts virtual tokens"),
    "lossless": (lambda: Lossless(tiny_config("llama")), "Lossless has no loss of its own"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_a_model_without_logits_for_each_label_is_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message), loss_without_logits(make()):
        pass


@pytest.mark.parametrize(
    ("chunk", "error", "message"),
    [(0, ValueError, "`chunk` must be at least 1, got 0"), (2.0, TypeError, "`chunk` must be a whole number, got 2.0")],
)
def test_a_chunk_that_is_no_number_of_rows_is_refused(chunk: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message), loss_without_logits(tiny_model("llama"), chunk=chunk):
        pass


def test_a_loss_of_routers_is_never_left_out_in_silence() -> None:
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2, output_router_logits=True,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    with pytest.raises(ValueError, match="Set `output_router_logits` to False"), loss_without_logits(model):
        model(**batch(LENGTH))


class Prefixed(transformers.LlamaForCausalLM):
    """Puts a token of its own in front of long texts."""

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        prefix = input_ids[:, : int(input_ids.shape[1] > 2)]
        return super().forward(torch.cat((prefix, input_ids), dim=1), **kwargs)


def test_tokens_of_the_models_own_are_never_taken_for_those_of_the_text() -> None:
    model, ids = Prefixed(tiny_config("llama")), batch(9)["input_ids"]
    with pytest.raises(ValueError, match="makes 10 tokens of 9 labels"), loss_without_logits(model):
        model(input_ids=ids, labels=ids)
