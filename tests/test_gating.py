"""An adapter that is off together with the patch: short text is that of the original model, whatever is beside it."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import Tensor

from hf_posext import PatchError, fixed_length, patch_model, suspended, unpatch_model
from hf_posext.attention.reading import OWNER
from hf_posext.beyond import places
from hf_posext.gates import KEPT
from hf_posext.gating import gate_adapter, is_gated, ungate_adapter
from hf_posext.tables import RowChoice
from tests import tables
from tests.architectures import tiny_model
from tests.dynamic import assert_close, padded, text
from tests.gated import ADAPTERS, BY_ROW, CASES, CAUSAL, adapted, by_hand, gated, no_cache, read
from tests.snapshots import differences, snapshot
from tests.special_models import build

LONG = 48
EVERYWHERE = ("lora", "dora", "whole")
KINDS = [
    *((row, adapter) for row in CASES for adapter in EVERYWHERE if (row, adapter) != ("gpt2", "dora")),
    *((row, adapter) for row in ("llama", "gpt_neox") for adapter in ("head", "head_lora")),
    *((row, adapter) for row in ("llama", "bloom", "bert") for adapter in ("embedding", "tokens")),
    ("llama", "ia3"),
]
PAIRS = [pytest.param(row, adapter, id=f"{row}-{adapter}") for row, adapter in KINDS]


@torch.no_grad()
@pytest.mark.parametrize("length", ["one", "N"])
@pytest.mark.parametrize(("row", "adapter"), PAIRS)
def test_text_of_at_most_n_tokens_is_read_as_by_the_original_to_the_last_bit(
    row: str, adapter: str, length: str
) -> None:
    case = CASES[row]
    tokens = text(1 if length == "one" else case.trained_length, 2)
    assert torch.equal(read(gated(case, adapter), tokens), read(case.make(), tokens))


@pytest.mark.parametrize(("row", "adapter"), PAIRS)
def test_short_text_is_the_same_with_gradients(row: str, adapter: str) -> None:
    """Where gradients are taken nothing is switched off: each token goes through the mask."""
    case, tokens = CASES[row], text(CASES[row].trained_length, 2)
    if row == "bart":
        assert torch.equal(
            tables.with_gradient(gated(case, adapter), tokens), tables.with_gradient(case.make(), tokens)
        )
    else:
        assert torch.equal(no_cache(gated(case, adapter), tokens), no_cache(case.make(), tokens))


PADDED = [
    *((*pair.values, "right") for pair in PAIRS),
    *((*pair.values, "left") for pair in PAIRS if pair.values[0] not in ("bert", "gpt2", "bart")),
]
"""Where padding takes positions, a row that is padded on the left is a long one."""


@torch.no_grad()
@pytest.mark.parametrize(("row", "adapter", "side"), PADDED)
def test_a_short_row_beside_a_long_one_is_the_patched_model_without_adapter(row: str, adapter: str, side: str) -> None:
    """To the last bit that of the same batch; the patch itself rounds in attention by what is beside a row."""
    case = CASES[row]
    batch = padded([text(20 if case.trained_length > 20 else 9)[0], text(LONG, seed=1)[0]], side)
    tokens, mask = batch["input_ids"], batch["attention_mask"]
    seen = mask[0].bool()
    found = read(gated(case, adapter), tokens, attention_mask=mask)
    assert torch.equal(found[0][seen], read(case.patched(), tokens, attention_mask=mask)[0][seen])
    assert_close(found[0][seen], read(case.make(), tokens[:1][:, seen])[0], 1e-4)


@torch.no_grad()
@pytest.mark.parametrize(("row", "adapter"), PAIRS)
def test_the_adapter_acts_from_the_token_after_n(row: str, adapter: str) -> None:
    case, tokens = CASES[row], text(CASES[row].trained_length + 1)
    change = (read(gated(case, adapter), tokens) - read(case.patched(), tokens)).abs().amax(-1)[0]
    assert change[-1] > 1e-2
    assert bool((change[:-1] > 1e-3).any()) == case.by_row


@torch.no_grad()
@pytest.mark.parametrize(("row", "adapter"), [pair for pair in PAIRS if pair.values[0] in BY_ROW])
def test_a_long_row_has_the_adapter_at_all_its_tokens(row: str, adapter: str) -> None:
    case, tokens = CASES[row], text(LONG, 2)
    assert torch.equal(read(gated(case, adapter), tokens), read(adapted(case, adapter), tokens))


@torch.no_grad()
@pytest.mark.parametrize("row", CAUSAL)
def test_tokens_beyond_n_are_those_of_a_lora_written_out_by_hand(row: str) -> None:
    case, model = CASES[row], gated(CASES[row])
    batch = padded([text(20)[0], text(LONG, seed=1)[0], text(40, seed=2)[0]], "left")
    tokens, mask = batch["input_ids"], batch["attention_mask"]
    beyond = mask.cumsum(-1) > case.trained_length
    expected = read(by_hand(case.patched(), model, beyond), tokens, attention_mask=mask)
    found = read(model, tokens, attention_mask=mask)
    assert_close(found[mask.bool()], expected[mask.bool()], 1e-4)


@torch.no_grad()
@pytest.mark.parametrize("row", CAUSAL)
def test_a_row_padded_on_the_left_is_read_as_alone(row: str) -> None:
    case, rows = CASES[row], [text(12)[0], text(40, seed=1)[0], text(LONG, seed=2)[0]]
    batch, model = padded(rows, "left"), gated(case, "whole")
    found = read(model, batch["input_ids"], attention_mask=batch["attention_mask"])
    for_each = [found[place, -len(row) :] for place, row in enumerate(rows)]
    alone = [read(model, row[None])[0] for row in rows]
    assert_close(torch.cat(for_each), torch.cat(alone), 1e-4)


def choices_of(row: str, inputs: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """For each reader of a table in a forward: what its table chose, and the same for places made ahead of it."""
    model, found = tables.patched_model(row, "pi_dynamic"), []

    def compare(owner: Any, args: Any, output: Any) -> None:
        reader = owner.__dict__[OWNER]
        ids = inputs["tokens"]
        found.append((reader.is_long.clone(), reader.chooses(places(reader, reader.forward, ids))))

    for module in model.modules():
        if isinstance(module.__dict__.get(OWNER), RowChoice):
            module.register_forward_hook(compare, prepend=True)
    tables.read(model, **inputs)
    return found


def classifier(*, is_gated: bool = True) -> Any:
    """An encoder whose head sees one vector for each row, under an adapter that trains this head too."""
    torch.manual_seed(1)
    model = build("AutoModelForSequenceClassification", "bert", tables.FAMILIES["bert"].settings)
    patch_model(model, "pi", 4, dynamic=True)
    config = LoraConfig(r=2, target_modules="all-linear", modules_to_save=["classifier"], init_lora_weights=False)
    model = get_peft_model(model, config).eval()
    model.get_base_model().classifier.modules_to_save["default"].weight.data.mul_(-3)
    return gate_adapter(model) if is_gated else model


@torch.no_grad()
def test_a_head_that_sees_one_vector_for_each_row_is_gated_by_rows() -> None:
    batch = tables.padded([text(20)[0], text(LONG, seed=1)[0], text(9, seed=2)[0]], "right", 0)
    found = classifier()(**batch).logits
    original = build("AutoModelForSequenceClassification", "bert", tables.FAMILIES["bert"].settings)
    assert_close(found[:1], original(input_ids=text(20)).logits, 1e-4)
    assert_close(found[1:2], classifier(is_gated=False)(input_ids=text(LONG, seed=1)).logits, 1e-4)


@torch.no_grad()
def test_a_decoder_that_reads_a_text_of_another_length_is_gated_by_its_own_rows() -> None:
    """Layers that read the encoder's states go by the rows of the decoder."""
    case, source = CASES["bart"], text(25, 2)
    batch = tables.padded([text(20)[0], text(LONG, seed=1)[0]], "right", 1)
    target = {"decoder_input_ids": batch["input_ids"], "decoder_attention_mask": batch["attention_mask"]}
    found = gated(case)(input_ids=source, use_cache=False, **target).logits
    expected = case.patched()(input_ids=source, use_cache=False, **target).logits
    assert torch.equal(found[0, :20], expected[0, :20])
    assert (found[1] - expected[1]).abs().max() > 0.1


TABLES = [row for row, kind in tables.EVERY_PAIR if kind == "pi_dynamic"]
BY_SLOT = "xglm"
"""Numbers slots, also those of padding, though its table has a row for padding."""
WAYS = [
    *(
        (row, side)
        for row in TABLES
        for side in ("left", "right", "unmasked")
        if (row, side) != ("deberta", "unmasked")
    ),
    *((row, "given") for row in ("bert", "gpt2", "gpt_neo", "roberta")),
]
KNOWN = [way for way in WAYS if way not in ((BY_SLOT, "left"), (BY_SLOT, "unmasked"))]


@pytest.mark.parametrize(("row", "side"), KNOWN)
def test_rows_are_told_long_ahead_of_the_table_as_by_the_table(row: str, side: str) -> None:
    pad = tables.make(row).config.pad_token_id
    rows = [text(20)[0], text(LONG, seed=1)[0], text(33, seed=2)[0], text(32, seed=3)[0]]
    batch = tables.padded(rows, "right" if side in ("given", "unmasked") else side, 1 if pad is None else pad)
    inputs = {"tokens": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    if side == "unmasked":
        inputs.pop("attention_mask")
    if side == "given":
        inputs["position_ids"] = (torch.arange(LONG) % 32)[None].expand(4, -1) + tables.FAMILIES[row].reserved
    found = choices_of(row, inputs)
    assert found
    assert [one.expand(4).tolist() for one, _ in found] == [other.expand(4).tolist() for _, other in found]


@torch.no_grad()
def test_rows_whose_padding_is_numbered_in_an_unknown_way_are_refused() -> None:
    model = tables.patched_model(BY_SLOT, "pi_dynamic")
    model = gate_adapter(get_peft_model(model, LoraConfig(r=2, target_modules=["fc1"], init_lora_weights=False)).eval())
    batch = tables.padded([text(20)[0], text(LONG, seed=1)[0]], "left", 1)
    assert read(model, text(LONG, 2)).isfinite().all()
    with pytest.raises(PatchError, match="numbers the positions of a padded batch"):
        read(model, batch["input_ids"], attention_mask=batch["attention_mask"])


@torch.no_grad()
@pytest.mark.parametrize("row", ["llama", "bert", "bloom"])
@pytest.mark.parametrize("length", ["N", "beyond"])
def test_a_fixed_length_decides_for_the_adapter_too(row: str, length: str) -> None:
    case, tokens = CASES[row], text(12, 2)
    model, fixed = gated(case), case.trained_length + (8 if length == "beyond" else 0)
    expected = adapted(case) if length == "beyond" else case.make()
    with fixed_length(model, fixed):
        found = read(model, tokens)
    if length == "beyond":
        with fixed_length(expected, fixed):
            assert torch.equal(found, read(expected, tokens))
    else:
        assert torch.equal(found, read(expected, tokens))


@torch.no_grad()
@pytest.mark.parametrize("adapter", ["lora", "dora", "whole", "tokens", "ia3", "head"])
def test_ungating_gives_back_the_adapter_and_leaves_nothing(adapter: str) -> None:
    model = adapted(CASES["llama"], adapter)
    before, expected, hooks = snapshot(model), read(model, text(LONG)), hooks_of(model)
    assert gate_adapter(model) is model
    assert is_gated(model)
    assert hooks_of(model) != hooks
    assert ungate_adapter(model) is model
    assert not is_gated(model)
    changed = [each for each in differences(before, snapshot(model)) if not each.endswith("._disable_adapters")]
    assert (hooks_of(model), changed) == (hooks, [])
    assert not [name for module in model.modules() for name in KEPT if name in vars(module)]
    assert torch.equal(read(model, text(LONG)), expected)


def hooks_of(model: Any) -> list[tuple[int, int, int, int, int]]:
    """How many hooks each module has."""
    return [
        (
            len(module._forward_pre_hooks),
            len(module._forward_hooks),
            len(module._forward_hooks_with_kwargs),
            len(module._forward_hooks_always_called),
            len(module._forward_pre_hooks_with_kwargs),
        )
        for module in model.modules()
    ]


@torch.no_grad()
def test_gating_twice_is_gating_once() -> None:
    once, twice = gated(CASES["llama"]), gate_adapter(gated(CASES["llama"]))
    assert hooks_of(once) == hooks_of(twice)
    assert torch.equal(read(once, text(LONG)), read(twice, text(LONG)))


@torch.no_grad()
@pytest.mark.parametrize("row", ["llama", "bert"])
def test_peft_first_and_then_the_patch_is_the_same(row: str) -> None:
    case = CASES[row]
    model = patch_model(adapted(case, model=case.make()), case.method, 4, dynamic=True)
    assert torch.equal(read(gate_adapter(model), text(LONG)), read(gated(case), text(LONG)))


@torch.no_grad()
@pytest.mark.parametrize("row", ["llama", "bloom", "bert"])
def test_without_the_patch_the_gated_adapter_is_off_at_every_length(row: str) -> None:
    case, model, tokens = CASES[row], gated(CASES[row], "whole"), text(CASES[row].trained_length)
    expected = read(model, text(LONG))
    with suspended(model):
        assert torch.equal(read(model, tokens), read(case.make(), tokens))
        if row != "bert":
            assert torch.equal(read(model, text(LONG)), read(case.make(), text(LONG)))
    assert torch.equal(read(model, text(LONG)), expected)
    unpatch_model(model)
    assert is_gated(model)
    assert torch.equal(read(model, tokens), read(case.make(), tokens))


@torch.no_grad()
def test_an_adapter_that_its_owner_switched_off_stays_off() -> None:
    model, case = gated(CASES["llama"], "whole"), CASES["llama"]
    expected = read(case.patched(), text(LONG))
    with model.disable_adapter():
        assert torch.equal(read(model, text(LONG)), expected)
        assert torch.equal(read(model, text(LONG)), expected)
    assert not torch.equal(read(model, text(LONG)), expected)


def refused(name: str) -> tuple[Any, str]:
    """A model that cannot be gated, and what is said of it."""
    llama = CASES["llama"]
    lists = {"long_factor": [2.0] * 8, "short_factor": [1.1] * 8}
    wrapped = {
        "plain": lambda: tiny_model("llama"),
        "no adapter": llama.patched,
        "unpatched": lambda: adapted(llama, model=tiny_model("llama")),
        "static": lambda: adapted(llama, model=patch_model(tiny_model("llama"), "yarn", 4)),
        "factor 1": lambda: adapted(llama, model=patch_model(tiny_model("llama"), "yarn", 1, dynamic=True)),
        "short list": lambda: adapted(llama, model=patch_model(tiny_model("llama"), "longrope", 4, **lists)),
        "merged": lambda: merged(adapted(llama)),
        "prompt": lambda: get_peft_model(
            llama.patched(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
        ),
        "bias": lambda: get_peft_model(
            CASES["gpt_neox"].patched(), LoraConfig(target_modules="all-linear", bias="all")
        ),
        "pissa": lambda: get_peft_model(
            llama.patched(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa")
        ),
        "attention": lambda: get_peft_model(
            llama.patched(), LoraConfig(target_modules=["up_proj"], modules_to_save=["self_attn"])
        ),
        "vision": lambda: get_peft_model(
            patch_model(tiny_model("qwen2_vl"), "pi", 4, dynamic=True), LoraConfig(r=2, target_modules=["qkv"])
        ),
        "composed": lambda: adapted(
            llama, model=patch_model(patch_model(tiny_model("llama"), "pi", 2), "yarn", 2, dynamic=True, compose=True)
        ),
    }[name]
    return wrapped(), REFUSALS[name]


REFUSALS = {
    "plain": "not patched. Call `patch_model` with dynamic=True",
    "no adapter": "has no PEFT adapter",
    "unpatched": "not patched",
    "static": "leaves text within N tokens as it is only with dynamic=True",
    "factor 1": "changes nothing",
    "short list": "does not leave text within 32 tokens as it is",
    "merged": "merged into `.*q_proj`.*`unmerge_adapter`",
    "prompt": "virtual tokens",
    "bias": "bias='all'.*changes weights of the base model",
    "pissa": "init_lora_weights='pissa'.*changes weights of the base model",
    "attention": "whole of `model.layers.0.self_attn`, which mixes tokens",
    "vision": "acts in `.*visual.*qkv`, which does not read the text",
    "composed": "does not leave text within .* tokens as it is",
}


def merged(model: Any) -> Any:
    """The model with its adapter merged."""
    model.merge_adapter()
    return model


@pytest.mark.parametrize("name", list(REFUSALS))
def test_what_cannot_be_gated_is_refused_and_left_as_it_was(name: str) -> None:
    model, words = refused(name)
    hooks = hooks_of(model)
    with pytest.raises(PatchError, match=words):
        gate_adapter(model)
    assert hooks_of(model) == hooks
    assert not is_gated(model)


def test_something_else_than_a_model_is_refused() -> None:
    with pytest.raises(TypeError, match="must be"):
        gate_adapter(torch.nn.Linear(2, 2))


@torch.no_grad()
def test_an_adapter_that_is_merged_later_is_refused_as_it_runs() -> None:
    model = merged(gated(CASES["llama"]))
    with pytest.raises(PatchError, match=r"was merged.*`unmerge_adapter`"):
        read(model, text(12))
    model.unmerge_adapter()
    assert_close(read(model, text(12)), read(CASES["llama"].make(), text(12)), 1e-3)


@torch.no_grad()
def test_a_layer_that_is_called_by_itself_is_refused() -> None:
    model = gated(CASES["llama"])
    with pytest.raises(PatchError, match="before the text of its model was read"):
        model.get_base_model().model.layers[0].mlp(torch.zeros(1, 3, 64))


def test_weights_that_are_used_outside_of_their_layer_are_found() -> None:
    """A host that multiplies with the embedding's weight itself never calls the layer that a gate could switch."""
    model = adapted(CASES["llama"], "whole")
    stack = model.get_base_model().model
    stack.layers[0].register_forward_hook(lambda _, __, output: output + stack.embed_tokens.weight.mean())
    with pytest.raises(PatchError, match="outside of its layers"):
        gate_adapter(model)
    assert not is_gated(model)


@pytest.mark.parametrize("adapter", list(ADAPTERS))
def test_every_adapter_of_these_tests_changes_long_text(adapter: str) -> None:
    case = CASES["llama"]
    assert (read(adapted(case, adapter), text(LONG)) - read(case.patched(), text(LONG))).abs().max() > 0.1
