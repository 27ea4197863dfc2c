"""The protocol `disjoint` against lm-eval itself (opt-in: `pip install "lm-eval[hf]"`, then `pytest -m lm_eval`)."""

from typing import Any

import pytest

from hf_posext.evaluation.perplexity import perplexity
from tests.evaluation.stubs import documents, text_of, tiny_llama, word_tokenizer

pytestmark = [
    pytest.mark.lm_eval,
    pytest.mark.filterwarnings("default"),  # lm-eval and what it imports warn of their own deprecations
    pytest.mark.transformers_logs("lm-eval's own calls"),
]


@pytest.mark.parametrize("context", [8, 17, 32])
@pytest.mark.parametrize("special", [{"bos_token": "<s>", "eos_token": "</s>"}, {"eos_token": "</s>"}])
def test_disjoint_is_lm_evals_rolling_loglikelihood(context: int, special: dict[str, Any]) -> None:
    models = pytest.importorskip("lm_eval.models.huggingface")
    instances = pytest.importorskip("lm_eval.api.instance")
    texts = [text_of(document) for document in documents(90, 33, 32, 61)]
    tokenizer, model = word_tokenizer(adds_bos=False, **special), tiny_llama()
    harness = models.HFLM(pretrained=model, tokenizer=tokenizer, max_length=context, device="cpu", batch_size=1)
    requests = [instances.Instance("loglikelihood_rolling", {}, (text,), index) for index, text in enumerate(texts)]
    expected = harness.loglikelihood_rolling(requests, disable_tqdm=True)

    report = perplexity(model, tokenizer, texts, context_lengths=[context], protocol="disjoint", resamples=10)
    assert report.measurements[0].nll == pytest.approx([-value for value in expected], rel=1e-5)
    assert report.measurements[0].tokens == (90, 33, 32, 61)
