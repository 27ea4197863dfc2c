"""The public names are those of the design, each has a docstring, and nothing else is exported."""

import inspect

import pytest

import hf_posext

PROMISED = [
    "patch_model", "unpatch_model", "patched", "inspect_model", "list_methods", "load_pretrained", "perplexity",
    "pseudo_perplexity", "finetune", "FinetuneConfig", "FinetuneResult", "gate_adapter",
    "compare", "passkey", "diagnose",
]  # fmt: skip


@pytest.mark.parametrize("name", PROMISED)
def test_promised_name_is_public(name):
    assert name in hf_posext.__all__


@pytest.mark.parametrize("name", hf_posext.__all__)
def test_public_name_resolves_and_is_documented(name):
    assert inspect.getdoc(getattr(hf_posext, name))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = hf_posext.no_such_name


def test_the_version_is_that_of_the_distribution():
    from importlib.metadata import version

    assert hf_posext.__version__ == version("hf_posext")
