"""NLL per target against the model's own full logits, and what the chunked head costs and leaves behind."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BartConfig,
    BertConfig,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    OPTConfig,
    PreTrainedConfig,
    T5Config,
)

from hf_posext.evaluation.scoring import causal_lm, check_causal, find_backbone, score
from hf_posext.evaluation.windows import Window, sliding_windows
from tests.evaluation.stubs import ContextCounter, documents, known_nll, tiny_llama

WINDOWS, _ = sliding_windows(documents(30, 17, 30), 16, 5)
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GPT2 = GPT2Config(
    vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3,
    bos_token_id=None, eos_token_id=None,
)  # fmt: skip
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": transformers.LlamaConfig(**SIZES),
    "gemma2": Gemma2Config(**SIZES, final_logit_softcapping=2.0),
    "cohere": CohereConfig(**SIZES, logit_scale=0.3),
    "granite": GraniteConfig(**SIZES, logits_scaling=3.0),
    "gpt2": GPT2,
    "opt": OPTConfig(
        vocab_size=50, hidden_size=32, word_embed_proj_dim=16, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, init_std=0.3, pad_token_id=1, bos_token_id=2, eos_token_id=2,
    ),
    "bart": BartConfig(
        vocab_size=50, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48, init_std=0.3,
        max_position_embeddings=64, is_encoder_decoder=False, is_decoder=True, forced_eos_token_id=None,
    ),
}  # fmt: skip


def build(name: str) -> nn.Module:
    """A tiny random model of a family."""
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(FAMILIES[name]).eval()


def direct(model: nn.Module, window: Window) -> Tensor:
    """NLL of a window's targets from the full logits in fp32, one forward, no chunks."""
    with torch.no_grad():
        logits = model(input_ids=window.tokens[None, :-1], use_cache=False).logits[0]
    log_probabilities = torch.log_softmax(logits.float(), dim=-1)
    return -torch.stack([log_probabilities[at - 1, window.tokens[at]] for at in range(window.first, window.last + 1)])


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    """Window by window, to rounding in fp32."""
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("chunk", "batch_size"), [(1024, 1), (3, 1), (7, 4)])
def test_chunked_head_gives_the_models_own_nll(name: str, chunk: int, batch_size: int) -> None:
    model = build(name)
    assert_equal(score(model, WINDOWS, chunk=chunk, batch_size=batch_size), [direct(model, w) for w in WINDOWS])


@pytest.mark.parametrize("name", FAMILIES)
def test_backbone_is_found(name: str) -> None:
    assert find_backbone(build(name)) is not None


@pytest.mark.parametrize("name", ["gemma2", "cohere", "granite"])
def test_the_cap_and_the_scales_of_these_heads_matter_here(name: str) -> None:
    model = build(name)
    hidden = model.model(input_ids=WINDOWS[0].tokens[None, :-1]).last_hidden_state
    logits = model(input_ids=WINDOWS[0].tokens[None, :-1]).logits
    assert (model.lm_head(hidden) - logits).abs().max() > 0.1


class Heads(list[int]):
    """Rows that a head has seen, call by call."""

    def watch(self, head: nn.Module) -> "Heads":
        head.register_forward_hook(lambda module, inputs, output: self.append(output.shape[:-1].numel()))
        return self


@pytest.mark.parametrize("chunk", [2, 5, 64])
def test_the_head_sees_scored_rows_only_and_never_more_than_a_chunk(chunk: int) -> None:
    model = tiny_llama()
    rows = Heads().watch(model.lm_head)
    score(model, WINDOWS, chunk=chunk, batch_size=3)
    targets = sum(len(window.targets) for window in WINDOWS)
    proof = 2 + 2  # the two tokens that the backbone is proved on, directly and through it
    assert max(rows) <= chunk
    assert sum(rows) == targets + proof


class LargestLogits(TorchDispatchMode):
    """The number of rows of the largest tensor over the vocabulary that any operation makes."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.rows = vocabulary, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.shape[-1:] == (self.vocabulary,) and func._schema.name != "aten::t":
            self.rows = max(self.rows, result.numel() // self.vocabulary)
        return result


@pytest.mark.parametrize("length", [50, 200])
def test_no_tensor_grows_with_context_times_vocabulary(length: int) -> None:
    windows, _ = sliding_windows(documents(2 * length), length, length)
    with LargestLogits(777) as largest:
        score(tiny_llama(vocab_size=777), windows, chunk=8)
    assert largest.rows == 8


def test_the_backbone_runs_once_per_batch() -> None:
    model = tiny_llama()
    passes = Heads().watch(model.model.layers[0].mlp)
    score(model, WINDOWS, chunk=3)
    assert len(passes) == len(WINDOWS) + 2


def test_bf16_logits_are_scored_in_fp32() -> None:
    model = tiny_llama().to(torch.bfloat16)
    found = score(model, WINDOWS, chunk=1024)
    assert {nll.dtype for nll in found} == {torch.float32}
    assert_equal(found, [direct(model, window) for window in WINDOWS])
    coarse = torch.cat(found).to(torch.bfloat16).float()
    assert not torch.equal(coarse, torch.cat(found))


def test_a_model_without_a_backbone_is_scored_from_its_logits() -> None:
    found = score(ContextCounter(), WINDOWS, chunk=3, batch_size=2)
    expected = [torch.tensor([known_nll(at) for at in range(w.first, w.last + 1)]) for w in WINDOWS]
    assert_equal(found, expected)


def test_a_head_that_mixes_positions_is_never_cut_in_rows() -> None:
    class Mixing(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
            outputs = super().forward(input_ids, **kwargs)
            return SimpleNamespace(logits=outputs.logits.cumsum(dim=1))

    torch.manual_seed(0)
    model = Mixing(FAMILIES["llama"]).eval()
    assert find_backbone(model) is None
    assert_equal(score(model, WINDOWS, chunk=3), [direct(model, window) for window in WINDOWS])


def test_lora_is_active_and_the_wrapper_untouched() -> None:
    base = tiny_llama()
    adapted = peft.get_peft_model(
        base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    found = score(adapted, WINDOWS, chunk=3)
    assert_equal(found, [direct(adapted, window) for window in WINDOWS])
    with adapted.disable_adapter():
        assert not torch.allclose(torch.cat(found), torch.cat([direct(adapted, window) for window in WINDOWS]))


def test_prompt_adapters_are_refused() -> None:
    config = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="PROMPT_TUNING adapter puts virtual tokens"):
        causal_lm(peft.get_peft_model(tiny_llama(), config))


def test_every_training_flag_is_put_back_and_dropout_is_off() -> None:
    model = tiny_llama(attention_dropout=0.9).train()
    model.model.norm.eval()
    before = [module.training for module in model.modules()]
    found = score(model, WINDOWS)
    assert [module.training for module in model.modules()] == before
    assert_equal(found, [direct(model.eval(), window) for window in WINDOWS])


@contextmanager
def broken(head: nn.Module) -> Iterator[None]:
    """A head that fails once more than two rows come."""

    def fail(module: nn.Module, inputs: tuple[Tensor]) -> None:
        if inputs[0].shape[1] > 2:
            raise MemoryError("no room")

    handle = head.register_forward_pre_hook(fail)
    yield
    handle.remove()


def test_an_error_leaves_the_model_as_it_was() -> None:
    model = tiny_llama().train()
    before = direct(model.eval(), WINDOWS[0])
    model.train()
    with broken(model.lm_head), pytest.raises(MemoryError):
        score(model, WINDOWS)
    assert "forward" not in vars(model.model)
    assert model.training
    torch.testing.assert_close(direct(model.eval(), WINDOWS[0]), before, rtol=0, atol=0)


def test_a_forward_set_on_the_instance_survives() -> None:
    model = tiny_llama()
    own = model.model.forward
    model.model.forward = lambda *args, **kwargs: own(*args, **kwargs)
    kept = vars(model.model)["forward"]
    score(model, WINDOWS)
    assert vars(model.model)["forward"] is kept


def test_results_can_be_trained_on_afterwards() -> None:
    model = tiny_llama().train()
    score(model, WINDOWS)
    model(input_ids=WINDOWS[0].tokens[None], labels=WINDOWS[0].tokens[None]).loss.backward()


def test_the_last_token_is_never_fed() -> None:
    model = ContextCounter()
    score(model, WINDOWS)
    fed = {tuple(row.tolist()) for batch in model.read[1:] for row in batch}  # the first call is the proof
    assert fed == {tuple(window.tokens[:-1].tolist()) for window in WINDOWS}


def test_no_windows_no_scores() -> None:
    assert score(ContextCounter(), []) == []


SMALL_BERT = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48
}  # fmt: skip
NOT_CAUSAL: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "masked": (lambda: transformers.BertForMaskedLM(BertConfig(**SMALL_BERT)), "looks at the following tokens too"),
    "headless": (lambda: transformers.GPT2Model(GPT2), "GPT2Model has none"),
    "classifier": (lambda: transformers.GPT2ForTokenClassification(GPT2), "has none"),
    "encoder-decoder": (
        lambda: transformers.T5ForConditionalGeneration(
            T5Config(vocab_size=50, d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=8)
        ),
        "is an encoder-decoder",
    ),
}


@pytest.mark.parametrize(("make", "message"), NOT_CAUSAL.values(), ids=NOT_CAUSAL)
def test_a_model_without_a_causal_head_is_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=f"A causal LM head is needed.*{message}"):
        check_causal(make())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_causal_models_pass(name: str, dtype: torch.dtype) -> None:
    check_causal(build(name).to(dtype))


def test_a_position_table_that_is_too_short_is_named() -> None:
    windows, _ = sliding_windows(documents(90), 80, 80)
    with pytest.raises(ValueError, match="cannot read 80 tokens"):
        score(build("gpt2"), windows)
