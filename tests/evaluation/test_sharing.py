"""One run serves every pass that is its beginning, and long passes can be read in blocks: with the same NLL."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import hf_posext
from hf_posext.evaluation.perplexity import perplexity
from hf_posext.evaluation.scoring import check_blocks, score
from hf_posext.evaluation.sharing import follows_length, shared
from hf_posext.evaluation.windows import Window, disjoint_windows, sliding_windows, tail_windows
from tests.evaluation.stubs import ContextCounter, documents, tiny_llama
from tests.evaluation.test_scoring import FAMILIES, SIZES, build, direct

DENSE = [8, 16, 24, 32, 40, 48]  # context lengths on a grid of 8 tokens


def dense_windows() -> list[Window]:
    """Four endpoints, each with contexts of six lengths."""
    plan, _ = tail_windows(documents(49 + 3 * 8), DENSE, targets=4, endpoints_per_document=4)
    return [window for length in DENSE for window in plan[length]]


def prefix(text: torch.Tensor, length: int) -> Window:
    """The first tokens of a text, and the one after them as the target."""
    return Window(0, text[: length + 1], length, length)


def long_window(length: int = 48) -> list[Window]:
    """Every token of one text."""
    (text,) = documents(length + 1)
    return [Window(0, text, 1, length)]


class Runs(list[int]):
    """How many tokens each run of a model has read, the two of the proof left out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: self._note(output.shape[1]))

    def _note(self, length: int) -> None:
        if length > 2:
            self.append(length)


def test_passes_with_one_beginning_are_one_run() -> None:
    text, other = documents(20, 20)
    passes = [prefix(text, 5), prefix(other, 5), prefix(text, 19), prefix(text, 9), prefix(other, 5)]
    runs = shared(passes, beginnings=True)
    assert [[index for index, _ in run.members] for run in runs] == [[0, 2, 3], [1, 4]]
    assert [len(run.fed) for run in runs] == [19, 5]


def test_passes_of_the_same_tokens_are_always_one_run() -> None:
    text, other = documents(20, 20)
    runs = shared([prefix(text, 5), prefix(other, 5), prefix(text, 9), prefix(other, 5)])
    assert [[index for index, _ in run.members] for run in runs] == [[0], [1, 3], [2]]


def test_one_other_token_is_another_run() -> None:
    (text,) = documents(20)
    changed = text.clone()
    changed[7] = (changed[7] + 1) % 40
    assert len(shared([prefix(text, 12), prefix(changed, 19)], beginnings=True)) == 2
    assert len(shared([prefix(text, 7), prefix(changed, 19)], beginnings=True)) == 1


def test_a_grid_of_lengths_needs_a_run_for_each_beginning_only() -> None:
    windows = dense_windows()
    ends = [48 + 8 * step for step in range(4)]
    beginnings = {end - length for end in ends for length in DENSE}
    assert len(windows) == len(ends) * len(DENSE) == 24
    assert len(shared(windows, beginnings=True)) == len(beginnings) == 9
    assert len(shared(windows)) == 24


def test_many_texts_behind_one_token_are_told_apart_quickly() -> None:
    """A run for each, in an order in which none has to be compared with all others (which took minutes)."""
    windows = disjoint_windows([*documents(*[60] * 4000), torch.tensor([1])], 64, prefix=0, bos=0)[0]
    assert len(shared(windows, beginnings=True)) == 4000


@pytest.mark.parametrize("windows", [sliding_windows(documents(60), 16, 5)[0], disjoint_windows(documents(60), 16)[0]])
def test_windows_that_begin_elsewhere_share_nothing(windows: list[Window]) -> None:
    assert len(shared(windows, beginnings=True)) == len(windows)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No trial of the model before it is read in blocks, which would be counted as well."""
    monkeypatch.setattr("hf_posext.evaluation.scoring.check_blocks", lambda network, block: None)


PATCHES: dict[str, dict[str, Any]] = {
    "none": {},
    "yarn": {"method": "yarn", "factor": 2},
    "yarn, dynamic": {"method": "yarn", "factor": 2, "dynamic": True},
    "ntk, dynamic": {"method": "ntk", "factor": 2, "dynamic": True},
    "dynamic_ntk": {"method": "dynamic_ntk", "factor": 2},
    "self_extend, dynamic": {"method": "self_extend", "factor": 2, "group_size": "dynamic"},
    "rerope": {"method": "rerope", "factor": 2},
    "alibi": {"method": "alibi", "factor": 2},
    "window": {"method": "window", "factor": 2},
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("patch", PATCHES)
def test_a_shared_run_gives_the_nll_of_each_pass_alone(patch: str) -> None:
    model = tiny_llama()
    if PATCHES[patch]:
        hf_posext.patch_model(model, **PATCHES[patch])
    runs, windows = Runs(model), dense_windows()
    found = score(model, windows, prefill_chunk_size=64)
    assert len(runs) == 9
    torch.testing.assert_close(found, [direct(model, window) for window in windows], rtol=1e-5, atol=2e-5)


def own_dynamic(kind: str) -> nn.Module:
    """A Llama whose checkpoint says a type that turns all keys by the length of the input."""
    block: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        block |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 16}
    return tiny_llama(rope_parameters=block)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_checkpoint_that_goes_by_the_length_of_the_input_is_known_by_its_numbers(kind: str) -> None:
    model = own_dynamic(kind)
    (long,), short = long_window(48), 12
    with torch.no_grad():
        alone, within = (model(input_ids=long.fed[None, :end]).logits[0, short - 1] for end in (short, 48))
    assert follows_length(model)
    assert (alone - within).abs().max() > 0.1


def test_documents_shorter_than_two_lengths_are_read_once() -> None:
    model = tiny_llama()
    runs = Runs(model)
    report = perplexity(
        model, None, documents(20, 24, 65), context_lengths=[32, 64], protocol="sliding", stride=64, resamples=10
    )
    assert sorted(runs) == [19, 23, 32, 32, 64]
    short, long = report.measurements
    assert short.nll[:2] == long.nll[:2]


def test_a_dynamic_patch_of_ours_on_such_a_checkpoint_goes_by_the_token_that_reads() -> None:
    model = own_dynamic("dynamic")
    hf_posext.patch_model(model, "yarn", 2, dynamic=True)
    assert not follows_length(model)


GEMMA = transformers.Gemma3TextConfig(
    **{**SIZES, "num_hidden_layers": 3, "sliding_window": 8, "sliding_window_pattern": 3}
)
HYBRID = {
    "gemma3": lambda: transformers.Gemma3ForCausalLM(GEMMA).eval(),
    **{name: lambda name=name: build(name) for name in FAMILIES},
}


@pytest.mark.parametrize("size", [1, 5, 16, 47, 48])
@pytest.mark.parametrize("name", HYBRID)
def test_blocks_with_a_cache_give_the_nll_of_one_pass(name: str, size: int) -> None:
    torch.manual_seed(0)
    model = HYBRID[name]()
    windows = [*long_window(48), *long_window(30)]
    found = score(model, windows, prefill_chunk_size=size)
    torch.testing.assert_close(found, [direct(model, window) for window in windows], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_linear_bias_that_follows_the_length_is_read_in_blocks(dynamic: bool) -> None:
    torch.manual_seed(0)
    config = transformers.MptConfig(
        vocab_size=50, d_model=32, n_layers=2, n_heads=4, max_seq_len=32, initializer_range=0.3
    )
    model = hf_posext.patch_model(transformers.MptForCausalLM(config).eval(), "pi", 2, dynamic=dynamic)
    windows = [*long_window(48), *long_window(20)]
    expected = [direct(model, window) for window in windows]
    for size in (7, 64):
        found = score(model, windows, prefill_chunk_size=size)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("patch", list(PATCHES)[1:])
def test_a_patched_model_is_read_in_blocks_as_in_one_pass(patch: str) -> None:
    model = tiny_llama()
    hf_posext.patch_model(model, **PATCHES[patch])
    windows = [*long_window(48), *long_window(40)]
    found = score(model, windows, batch_size=2, prefill_chunk_size=13)
    torch.testing.assert_close(found, [direct(model, window) for window in windows], rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("unchecked")
def test_no_more_than_a_block_is_read_at_a_time_and_each_token_once() -> None:
    model = tiny_llama()
    runs = Runs(model)
    score(model, long_window(48), prefill_chunk_size=13)
    assert runs == [13, 13, 13, 9]


@pytest.mark.usefixtures("unchecked")
def test_scored_rows_alone_reach_the_head_block_by_block() -> None:
    model = tiny_llama()
    rows: list[int] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: rows.append(output.shape[:-1].numel()))
    (window,) = long_window(48)
    score(model, [Window(0, window.tokens, 30, 48)], chunk=4, prefill_chunk_size=13)
    assert max(rows) == 4
    assert sum(rows) == 19 + 4  # the targets, and the proof of the backbone


@pytest.mark.parametrize("protocol", ["tail", "full", "sliding", "disjoint"])
def test_perplexity_in_blocks_is_that_of_whole_passes(protocol: str) -> None:
    settings: dict[str, Any] = {"context_lengths": [16, 32], "protocol": protocol, "targets": 8, "resamples": 10}
    whole, blocks = (
        perplexity(tiny_llama(), None, documents(70, 50), **settings, prefill_chunk_size=size) for size in (None, 7)
    )
    assert blocks.protocol["digest"] == whole.protocol["digest"]
    assert [row["nll"] for row in blocks.rows] == pytest.approx([row["nll"] for row in whole.rows], rel=1e-6)


def bert() -> nn.Module:
    """A masked LM."""
    return transformers.BertForMaskedLM(transformers.BertConfig(**{**SIZES, "pad_token_id": 0})).eval()


BY_LENGTH = "reads each token by the length of the whole input"


def recurrent(name: str, **settings: Any) -> nn.Module:
    """A random model with layers that carry a state of their own, which keys and values do not hold."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **{**SIZES, **settings})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


OTHERWISE = "reads blocks with a cache otherwise than one pass"
REFUSED: dict[str, tuple[Any, str]] = {
    "no cache": (ContextCounter, "ContextCounter takes no cache of keys and values"),
    "masked": (bert, "BertForMaskedLM (takes no cache|reads blocks with a cache otherwise than one pass)"),
    "dynamic": (lambda: own_dynamic("dynamic"), BY_LENGTH),
    "longrope": (lambda: own_dynamic("longrope"), BY_LENGTH),
    "recurrent": (lambda: recurrent("recurrent_gemma", lru_width=32, attention_window_size=16), OTHERWISE),
    "dynamic table": (lambda: hf_posext.patch_model(build("gpt2"), "pi", 2, dynamic=True), BY_LENGTH),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HYBRID)
def test_rounding_in_half_precision_is_no_reason_to_refuse_a_model(name: str, dtype: torch.dtype) -> None:
    check_blocks(HYBRID[name]().to(dtype), 1)


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_a_model_that_a_cache_reads_otherwise_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}.*Leave `prefill_chunk_size` out"):
        score(make(), long_window(48), prefill_chunk_size=16)


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-1, ValueError), (2.5, TypeError), (True, TypeError)])
def test_a_block_is_a_whole_number_of_tokens(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"`prefill_chunk_size` must be .*{value!r}"):
        perplexity(tiny_llama(), None, documents(70), context_lengths=[32], prefill_chunk_size=value)


@pytest.mark.parametrize(("words", "rows"), [(50, 64), (2**18, 32)])
def test_the_head_makes_fewer_rows_at_a_time_of_a_large_vocabulary(words: int, rows: int) -> None:
    model = tiny_llama(vocab_size=words, hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
    seen: list[int] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[:-1].numel()))
    score(model, long_window(64), chunk=64)
    assert max(seen) == rows
