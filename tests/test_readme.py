"""README says what is true: its table of methods is the registry, its Python runs, its commands are those of CI."""

import re
from pathlib import Path

import pytest
from transformers import AutoModelForMaskedLM

import hf_posext
from hf_posext.methods import REGISTRY

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def method_rows() -> dict[str, tuple[str, ...]]:
    """Method name -> aliases, from the first column of the table of methods."""
    table = README.split("## Methods")[1].split("\n\n- ")[0]
    rows = re.findall(r"^\| `(\w+)`(?: \(([^)]*)\))? \|", table, flags=re.MULTILINE)
    return {name: tuple(re.findall(r"`(\w+)`", aliases)) for name, aliases in rows}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_table_lists_every_method_with_its_aliases():
    assert method_rows() == {method.name: method.aliases for method in REGISTRY.values()}


@pytest.mark.parametrize("name", list(REGISTRY))
def test_the_table_lists_every_option(name):
    row = next(line for line in README.splitlines() if line.startswith(f"| `{name}`"))
    inherited = {"yarn": "ntk_by_parts"}.get(name)
    text = row + next((line for line in README.splitlines() if line.startswith(f"| `{inherited}`")), "")
    assert [option for option in REGISTRY[name].all_options() if f"`{option}`" not in text] == []


def test_the_first_python_block_runs(capsys):
    namespace: dict = {}
    exec(blocks("python")[0], namespace)
    assert "yarn - truncate at 1024" in capsys.readouterr().out
    assert not hasattr(namespace["model"].config, "posext")


def test_the_block_on_short_prompts_runs():
    """Its asserts say that short text keeps every bit, and that a cache changes no answer."""
    namespace: dict = {}
    exec("import hf_posext\nfrom hf_posext.demo import load_demo", namespace)
    exec(blocks("python")[1], namespace)
    assert namespace["model"].config.posext["dynamic"]


def test_the_block_on_methods_in_attention_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    exec("import hf_posext\nfrom hf_posext.demo import load_demo", namespace)
    exec(blocks("python")[2], namespace)
    assert namespace["model"].config.posext["options"] == {"group_size": "dynamic"}
    assert hf_posext.inspect_model(namespace["model"]).in_force


def test_the_block_on_encoders_runs(tmp_path, monkeypatch):
    """Its asserts say that short text keeps every bit and that long text can be read; what it saves loads plainly."""
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    exec("import torch\nimport hf_posext\nfrom hf_posext.demo import load_demo", namespace)
    exec(blocks("python")[3], namespace)
    assert AutoModelForMaskedLM.from_pretrained("bert-1024").config.max_position_embeddings == 1024


def test_the_block_on_tuning_runs(tmp_path, monkeypatch, capsys):
    """With two steps in place of two hundred."""
    monkeypatch.chdir(tmp_path)
    (block,) = [block for block in blocks("python") if "FinetuneConfig" in block]
    assert '"max_steps": 200' in block
    namespace: dict = {}
    exec("import hf_posext\nfrom hf_posext.demo import load_demo", namespace)
    exec(block.replace('"max_steps": 200', '"max_steps": 2'), namespace)
    assert "2 steps on 4,096 tokens" in capsys.readouterr().out
    assert hf_posext.record_of(hf_posext.load_pretrained("llama-pi-4x")).factor == 4


def test_the_block_on_evaluation_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (block,) = [block for block in blocks("python") if "hf_posext.compare(" in block]
    namespace: dict = {}
    exec("import hf_posext\nfrom hf_posext.demo import load_demo", namespace)
    exec(block, namespace)
    assert {"none", "truncate", "window", "yarn (dynamic)"} < set(namespace["report"].arms)
    assert (tmp_path / "comparison.html").is_file()
    assert "hf_posext.patch_model(model, 'self_extend'" in capsys.readouterr().out


def test_the_matrix_of_mechanisms_is_the_registry():
    head, _, *rows = re.search(r"\| method \| rotary .*?\n\n", README, flags=re.DOTALL)[0].strip().splitlines()
    columns = [cell.strip() for cell in head.strip("|").split("|")][1:]
    found = {}
    for row in rows:
        names, *marks = [cell.strip() for cell in row.strip("|").split("|")]
        for name in re.findall(r"`(\w+)`", names):
            found[name] = {column for column, mark in zip(columns, marks, strict=True) if mark == "x"}
    assert found == {name: set(each.functions) for name, each in REGISTRY.items() if "attention" not in each.functions}


def test_the_set_up_is_exactly_two_commands_and_ci_runs_the_second():
    commands = [line for block in blocks("bash")[:2] for line in block.strip().splitlines()]
    assert commands == [
        "pip install -c constraints.txt -e . && posext demo --quick",
        'pip install -c constraints.txt -e ".[test]" && pytest',
    ]
    assert 'pip install --quiet -c constraints.txt -e ".[test]"\npytest' in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#:]+)\)", README))
def test_links_lead_to_files(target):
    assert (ROOT / target).exists()
