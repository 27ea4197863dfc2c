"""A model, patched or not, inside lm-eval itself (opt-in: `pip install "lm-eval[hf]"`, then `pytest -m lm_eval`)."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, PreTrainedTokenizerBase

from hf_posext import patch_model
from hf_posext.demo import load_demo
from hf_posext.evaluation.perplexity import perplexity
from tests.evaluation.stubs import documents, text_of, tiny_llama, word_tokenizer

pytestmark = [
    pytest.mark.lm_eval,
    pytest.mark.filterwarnings("default"),  # lm-eval and what it imports warn of their own deprecations
    pytest.mark.transformers_logs("lm-eval's own calls"),
]

LONGEST = 1024  # tokens; the demo model was trained at 256
METHODS: dict[str, dict[str, Any]] = {
    "yarn": {"method": "yarn"},
    "self_extend": {"method": "self_extend"},
    "alibi": {"method": "alibi"},
    "dynamic yarn": {"method": "yarn", "dynamic": True},
}
EVERY_METHOD = pytest.mark.parametrize("name", METHODS)


def demo(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[str]]:
    """The demo model stretched four times, its tokenizer, and the beginnings of two books: 2.1 and 1.4 contexts."""
    model, tokenizer, books = load_demo("llama")
    ids = [tokenizer(book[:9000])["input_ids"][1:] for book in books[:2]]  # without the BOS
    texts = [tokenizer.decode(ids[0][:2150]), tokenizer.decode(ids[1][:1430])]
    return patch_model(model, factor=4, **METHODS[name]), tokenizer, texts


def harness(model: PreTrainedModel, tokenizer: Any, **settings: Any) -> Any:
    """The model as lm-eval's users give it."""
    models = pytest.importorskip("lm_eval.models.huggingface")
    return models.HFLM(pretrained=model, tokenizer=tokenizer, device="cpu", **{"batch_size": 1, **settings})


def rolling(model: PreTrainedModel, tokenizer: Any) -> Any:
    """For texts in rolling windows: `HFLM` puts the BOS there itself, and would score one that the tokenizer adds."""
    return harness(model, tokenizer, add_bos_token=False)


def asked(kind: str, arguments: list[tuple[str, ...]]) -> list[Any]:
    """Requests of lm-eval."""
    instances = pytest.importorskip("lm_eval.api.instance")
    return [instances.Instance(kind, {}, words, index) for index, words in enumerate(arguments)]


def questions(text: str) -> list[tuple[str, str]]:
    """Contexts of four lengths up to three quarters of the longest, each with what follows."""
    words = text.split()
    return [(" ".join(words[:count]), " " + " ".join(words[count : count + 5])) for count in (40, 150, 300, 420)]


@pytest.mark.parametrize("context", [8, 17, 32])
@pytest.mark.parametrize("special", [{"bos_token": "<s>", "eos_token": "</s>"}, {"eos_token": "</s>"}])
def test_disjoint_is_lm_evals_rolling_loglikelihood(context: int, special: dict[str, Any]) -> None:
    texts = [text_of(document) for document in documents(90, 33, 32, 61)]
    tokenizer, model = word_tokenizer(adds_bos=False, **special), tiny_llama()
    requests = asked("loglikelihood_rolling", [(text,) for text in texts])
    expected = harness(model, tokenizer, max_length=context).loglikelihood_rolling(requests, disable_tqdm=True)

    report = perplexity(model, tokenizer, texts, context_lengths=[context], protocol="disjoint", resamples=10)
    assert report.measurements[0].nll == pytest.approx([-value for value in expected], rel=1e-5)
    assert report.measurements[0].tokens == (90, 33, 32, 61)


@EVERY_METHOD
def test_lm_eval_reads_as_far_as_the_patch_says(name: str) -> None:
    model, tokenizer, _ = demo(name)
    assert harness(model, tokenizer).max_length == LONGEST


@EVERY_METHOD
def test_disjoint_is_lm_evals_rolling_loglikelihood_of_a_patched_model(name: str) -> None:
    model, tokenizer, texts = demo(name)
    requests = asked("loglikelihood_rolling", [(text,) for text in texts])
    expected = rolling(model, tokenizer).loglikelihood_rolling(requests, disable_tqdm=True)

    report = perplexity(model, tokenizer, texts, context_lengths=[LONGEST], protocol="disjoint", resamples=10)
    assert min(report.measurements[0].tokens) > LONGEST
    assert report.measurements[0].nll == pytest.approx([-value for value in expected], rel=1e-5)


@EVERY_METHOD
def test_a_continuation_behind_a_long_context_has_its_own_log_likelihood(name: str) -> None:
    model, tokenizer, (text, _) = demo(name)
    asked_for = questions(text)
    found = harness(model, tokenizer).loglikelihood(asked("loglikelihood", asked_for), disable_tqdm=True)

    context, continuation = asked_for[-1]
    ids = tokenizer(context + continuation, return_tensors="pt")["input_ids"]
    start = len(tokenizer(context)["input_ids"])
    with torch.no_grad():
        scores = model.eval()(ids).logits[0].log_softmax(-1)
    direct = scores[start - 1 : -1].gather(1, ids[0, start:, None]).sum()
    assert start > LONGEST // 2
    assert found[-1][0] == pytest.approx(float(direct), rel=1e-5)


@EVERY_METHOD
def test_a_padded_batch_is_read_as_its_rows_alone(name: str) -> None:
    model, tokenizer, (text, _) = demo(name)
    requests = asked("loglikelihood", questions(text))
    alone, batched = (
        harness(model, tokenizer, batch_size=size).loglikelihood(requests, disable_tqdm=True) for size in (1, 4)
    )
    assert [value for value, _ in batched] == pytest.approx([value for value, _ in alone], rel=1e-5)


def test_a_table_that_grows_with_the_row_is_told_no_row_lengths_by_lm_eval() -> None:
    """Why `dynamic=True` on a learned table needs `batch_size=1`: ids are padded on the right and no mask is given."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=32, initializer_range=0.3)
    model = patch_model(GPT2LMHeadModel(config).eval(), "pi", factor=4, dynamic=True)
    tokenizer = word_tokenizer(adds_bos=False, bos_token="<s>", eos_token="</s>")
    short, long = (text_of(document) for document in documents(20, 100))
    requests = asked("loglikelihood", [(short, " w1 w2"), (long, " w3 w4")])
    alone, batched = (
        [value for value, _ in harness(model, tokenizer, batch_size=size).loglikelihood(requests, disable_tqdm=True)]
        for size in (1, 2)
    )
    assert batched[1] == pytest.approx(alone[1], rel=1e-5)  # the longest row has no padding
    assert batched[0] != pytest.approx(alone[0], rel=1e-3)


def test_a_task_of_lm_eval_gives_our_number_per_byte(tmp_path: Path) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    model, tokenizer, texts = demo("yarn")
    rows = tmp_path / "books.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    task = {
        "task": "books", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(rows)}},
        "test_split": "test", "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    }  # fmt: skip
    found = lm_eval.simple_evaluate(model=rolling(model, tokenizer), tasks=[task], bootstrap_iters=0)

    report = perplexity(model, tokenizer, texts, context_lengths=[LONGEST], protocol="disjoint", resamples=10)
    per_byte = sum(report.measurements[0].nll) / sum(len(text.encode()) for text in texts)
    assert found["results"]["books"]["byte_perplexity,none"] == pytest.approx(math.exp(per_byte), rel=1e-5)
