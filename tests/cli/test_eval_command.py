"""`posext eval`: the numbers of `perplexity` or `pseudo_perplexity`, from files, as a table, as JSON and as a plot."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForMaskedLM

import hf_posext
from hf_posext.demo import held_out_documents, load_demo
from tests.evaluation.masked_stubs import build, documents, masking_tokenizer

ROW_KEYS = ["arm", "context_length", "nll", "perplexity", "low", "high", "tokens", "documents", "skipped"]
TEXTS = [text[:4000] for text in held_out_documents()[:2]]


@pytest.fixture
def books(tmp_path: Path) -> Path:
    """Two short documents, one per line."""
    path = tmp_path / "books.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as lines:
        lines.write("".join(json.dumps({"body": text}) + "\n" for text in TEXTS) + "\n")
    return path


def test_the_rows_are_those_of_perplexity(posext: Any, books: Path) -> None:
    words = ["--context-lengths", "256,512", "--method", "pi", "--factor", "2", "--bars", "truncate,none"]
    outcome = posext("eval", "demo:llama", "--text", books, "--text-column", "body", *words, "--json")
    assert outcome.code == 0
    assert outcome.err == ""
    model, tokenizer, _ = load_demo("llama")
    hf_posext.patch_model(model, "pi", 2)
    report = hf_posext.perplexity(model, tokenizer, TEXTS, context_lengths=[256, 512], bars=["truncate", "none"])
    assert [list(row) for row in outcome.data["rows"]] == [ROW_KEYS] * 6
    assert outcome.data["rows"] == report.rows
    assert outcome.data["record"]["method"] == "pi"


def test_a_dynamic_factor_leaves_text_of_the_trained_length_alone(posext: Any, books: Path) -> None:
    words = ["--context-lengths", "256,512", "--text", books, "--text-column", "body"]
    plain = posext("eval", "demo:llama", *words, "--json").data["rows"]
    outcome = posext("eval", "demo:llama", *words, "--method", "yarn", "--factor", "2", "--dynamic")
    assert "yarn: dynamic, factor 2.0" in outcome.out
    data = posext("eval", "demo:llama", *words, "--method", "yarn", "--factor", "2", "--dynamic", "--json").data
    nll = {row["context_length"]: row["nll"] for row in data["rows"] if row["arm"] == "yarn"}
    before = {row["context_length"]: row["nll"] for row in plain if row["arm"] == "none"}
    assert nll[256] == before[256]
    assert nll[512] < before[512]


def test_a_window_can_be_asked_for_with_every_protocol(posext: Any, books: Path) -> None:
    words = ["--text", books, "--text-column", "body", "--context-lengths", "256,512", "--protocol", "full"]
    outcome = posext("eval", "demo:llama", *words, "--bars", "window", "--json")
    assert [(row["arm"], row["context_length"]) for row in outcome.data["rows"]] == [
        (arm, length) for arm in ("none", "window") for length in (256, 512)
    ]


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("self_extend", {"group_size": 4, "window": 64}),
        ("self_extend", {"group_size": "dynamic", "window": 64}),
        ("rerope", {"window": 128, "logn": True}),
        ("leaky_rerope", {"window": 64, "slope": 0.125}),
        ("alibi", {"slopes": [0.5, 0.25, 0.125]}),
        ("nope", {}),
        ("window", {"width": 128, "sinks": 4}),
    ],
)
def test_methods_that_act_in_attention_take_their_options(
    posext: Any, books: Path, method: str, options: dict[str, Any]
) -> None:
    words = ["--context-lengths", "300", "--text", books, "--text-column", "body", "--endpoints", "1", "--bars", "none"]
    for name, value in options.items():
        words += ["--option", f"{name}={json.dumps(value)}"]
    outcome = posext("eval", "demo:llama", *words, "--method", method, "--factor", "2", "--json")
    assert outcome.code == 0
    model, tokenizer, _ = load_demo("llama")
    hf_posext.patch_model(model, method, 2, **options)
    report = hf_posext.perplexity(
        model, tokenizer, TEXTS, context_lengths=[300], endpoints_per_document=1, bars=["none"]
    )
    assert outcome.data["rows"] == report.rows
    assert outcome.data["record"]["options"] == options


def test_options_are_printed_beside_the_arm(posext: Any, books: Path) -> None:
    words = ["--context-lengths", "300", "--text", books, "--text-column", "body", "--endpoints", "1"]
    out = posext("eval", "demo:llama", *words, "--method", "rerope", "--factor", "2", "--option", "window=64").out
    assert "rerope: factor 2.0, window 64" in out
    assert "rerope - truncate at 300: " in out
    assert "rerope - window at 300: " in out


def test_the_demo_text_is_read_without_a_file(posext: Any) -> None:
    words = ["--context-lengths", "128", "--documents", "3", "--endpoints", "1", "--batch-size", "2", "--json"]
    row, *bars = posext("eval", "demo:llama", *words).data["rows"]
    assert [bar["arm"] for bar in bars] == ["truncate", "window"]
    assert (row["arm"], row["documents"], row["tokens"]) == ("none", 3, 3 * 128)


def test_each_txt_file_is_one_document(posext: Any, tmp_path: Path) -> None:
    files = [tmp_path / f"{index}.txt" for index in range(2)]
    files[0].write_text(TEXTS[0], encoding="utf-8")
    files[1].write_text(TEXTS[1], encoding="utf-8")
    words = ["--context-lengths", "128", "--protocol", "disjoint", "--json"]
    (row,) = posext("eval", "demo:llama", "--text", files[0], "--text", files[1], *words).data["rows"]
    tokenizer = load_demo("llama")[1]
    assert row["documents"] == 2
    assert row["tokens"] == sum(
        len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) for text in TEXTS
    )


def test_stride_reaches_the_sliding_protocol(posext: Any, books: Path) -> None:
    words = ["--text", books, "--text-column", "body", "--context-lengths", "128", "--protocol", "sliding"]
    assert posext("eval", "demo:llama", *words, "--stride", "64", "--json").data["protocol"]["stride"] == 64


def test_text_can_be_read_in_blocks(posext: Any, books: Path) -> None:
    words = ["--text", books, "--text-column", "body", "--context-lengths", "128", "--bars", "", "--json"]
    blocks = posext("eval", "demo:llama", *words, "--prefill-chunk-size", "50").data
    assert blocks["protocol"]["prefill_chunk_size"] == 50
    assert blocks["rows"][0]["nll"] == pytest.approx(
        posext("eval", "demo:llama", *words).data["rows"][0]["nll"], rel=1e-6
    )


def test_out_gets_the_report_and_the_plot(posext: Any, books: Path, tmp_path: Path) -> None:
    words = ["--text", books, "--text-column", "body", "--context-lengths", "128,256", "--out", tmp_path / "a" / "b"]
    outcome = posext("eval", "demo:llama", *words)
    assert "truncate" in outcome.out
    assert f"saved {tmp_path / 'a' / 'b' / 'plot.png'}" in outcome.out
    report = json.loads((tmp_path / "a" / "b" / "report.json").read_text(encoding="utf-8"))
    assert [row["arm"] for row in report["rows"]] == [arm for arm in ("none", "truncate", "window") for _ in range(2)]
    assert (tmp_path / "a" / "b" / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.jsonl", '{"text": "x"}\n{"text": \n', "a.jsonl, line 2"),
        ("a.jsonl", "[1]\n", "line 1 is a list"),
        ("a.jsonl", '{"body": "x"}\n', "'text'"),
        ("a.csv", "text\nx\n", "a.csv"),
        ("a.txt", "", "0"),
    ],
)
def test_a_bad_file_is_named_with_its_line(posext: Any, tmp_path: Path, name: str, content: str, named: str) -> None:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    outcome = posext("eval", "demo:llama", "--context-lengths", "256", "--text", path)
    assert outcome.code == 2
    assert named in outcome.err
    assert len(outcome.err.splitlines()) == 1


def test_text_needs_a_tokenizer(posext: Any, tmp_path: Path, books: Path) -> None:
    load_demo("llama")[0].save_pretrained(tmp_path / "bare")
    outcome = posext("eval", tmp_path / "bare", "--context-lengths", "256", "--text", books)
    assert outcome.code == 2
    assert "has no tokenizer" in outcome.err


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A saved masked LM of 32 tokens and its tokenizer. Made before `posext` is, which would catch its progress bar."""
    path = tmp_path / "bert"
    build().save_pretrained(path)
    masking_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """Three documents in the words of that tokenizer."""
    path = tmp_path / "words.jsonl"
    texts = [" ".join(f"w{int(token)}" for token in ids) for ids in documents(140, 90, 121)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def test_the_rows_of_a_masked_lm_are_those_of_pseudo_perplexity(bert: Path, words: Path, posext: Any) -> None:
    options = ["--method", "alibi", "--factor", "2", "--draws", "2", "--mask-share", "0.2", "--endpoints", "2"]
    outcome = posext("eval", bert, "--text", words, "--context-lengths", "32,64", *options, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    model = hf_posext.patch_model(AutoModelForMaskedLM.from_pretrained(bert), "alibi", 2)
    settings = {"draws": 2, "mask_share": 0.2, "endpoints_per_document": 2}
    report = hf_posext.pseudo_perplexity(
        model, masking_tokenizer(), documents(140, 90, 121), context_lengths=[32, 64], **settings
    )
    assert outcome.data["rows"] == report.rows
    assert [list(row) for row in outcome.data["rows"]] == [[*ROW_KEYS, "positions"]] * 10
    assert outcome.data["record"]["method"] == "alibi"


def test_a_masked_lm_is_printed_and_plotted(bert: Path, words: Path, posext: Any, tmp_path: Path) -> None:
    outcome = posext("eval", bert, "--text", words, "--context-lengths", "16,32", "--out", tmp_path / "out")
    assert "Pseudo-perplexity (masked tokens, 15 % at a time, of 28 tokens)" in outcome.out
    assert json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))["protocol"]["draws"] == 4
    assert (tmp_path / "out" / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--context-lengths", "64"], "cannot read 64 tokens: its table of positions ends at 32"),
        (["--context-lengths", "32", "--protocol", "full"], "`--protocol` is for causal models, got 'full'"),
        (["--context-lengths", "32", "--stride", "4"], "`--stride` is for causal models, got 4"),
        (
            ["--context-lengths", "32", "--prefill-chunk-size", "8"],
            "`--prefill-chunk-size` is for causal models, got 8",
        ),
        (["--context-lengths", "32", "--bars", "window"], "Unknown bar 'window'"),
    ],
)
def test_what_a_masked_lm_cannot_have_is_named(
    bert: Path, words: Path, posext: Any, options: list[str], named: str
) -> None:
    outcome = posext("eval", bert, "--text", words, *options)
    assert (outcome.code, len(outcome.err.splitlines())) == (2, 1)
    assert named in outcome.err


def test_draws_are_for_masked_models(posext: Any, books: Path) -> None:
    outcome = posext("eval", "demo:llama", "--context-lengths", "128", "--text", books, "--draws", "2")
    assert outcome.code == 2
    assert "`--draws` is for masked LMs, got 2 with LlamaForCausalLM. Leave it out." in outcome.err
