"""load_pretrained and export_config: a patched model in another process, adapters, configs for older readers."""

from __future__ import annotations

import copy
import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from hf_posext.applying import replay
from hf_posext.arguments import check_choice
from hf_posext.compat import quiet
from hf_posext.errors import PatchError, quoted
from hf_posext.gating import gate_adapter
from hf_posext.lengths import rope_blocks, text_part
from hf_posext.mechanisms import root_model
from hf_posext.patching import ensure_adopted
from hf_posext.records import CONFIG_FIELD, OWN_WEIGHTS, is_for_gated, read_record, record_of

LAYOUTS = ("v4", "v5")
ADAPTER_CONFIG = "adapter_config.json"
WHERE = ("revision", "subfolder", "cache_dir", "token", "local_files_only")


def load_pretrained(
    path: str | os.PathLike[str],
    auto_class: Any = AutoModelForCausalLM,
    *,
    base: str | os.PathLike[str] | None = None,
    **from_pretrained_kwargs: Any,
) -> nn.Module:
    """Loads a saved model with its patch in force, whether or not plain transformers can express it.

    For a folder with a PEFT adapter and its `posext.json`, the base model is loaded, patched and given the adapter,
    which is gated if it was (`gate_adapter`).

    Args:
        path: folder or hub id of a saved model, or folder of a saved adapter.
        auto_class: auto class (or model class) of the model.
        base: folder or hub id of the base model of an adapter, where `adapter_config.json` does not name it or names
            another place.
        from_pretrained_kwargs: handed to `from_pretrained` of the base model.

    Returns:
        The patched model; a checkpoint without a record loads as it is.

    Raises:
        PatchError: an adapter without a base or for another patch than the one that its base has, or a record that does
            not fit.
        ValueError: a base for a folder without an adapter.
    """
    if (Path(path) / ADAPTER_CONFIG).is_file():
        return load_adapter(Path(path), auto_class, base, from_pretrained_kwargs)
    if base is not None:
        raise ValueError(
            f"`base` is for the folder of an adapter, and {str(path)!r} has no {ADAPTER_CONFIG}. Leave it out."
        )
    where = {name: value for name, value in from_pretrained_kwargs.items() if name in WHERE}
    saved = PreTrainedConfig.get_config_dict(path, **where)[0].get(CONFIG_FIELD) or {}
    with quiet() if saved.get("own") else nullcontext():  # transformers skips what it does not know
        model = auto_class.from_pretrained(path, **from_pretrained_kwargs)
    ensure_adopted(model)
    load_own_parameters(model, path, where)
    return model


def load_own_parameters(model: nn.Module, path: str | os.PathLike[str], where: dict[str, Any]) -> None:
    """Loads what a patch has added to the weights (learned slopes, old rows), which transformers does not know.

    A model without its head, or with one, has the same names with another beginning.

    Args:
        model: the patched model.
        path: folder or hub id of the checkpoint.
        where: keyword arguments of `from_pretrained` that say where its files are.

    Raises:
        PatchError: it is not there.
    """
    record = record_of(model)
    own = tuple(record.own) if record is not None else ()
    missing = {name: value for name, value in model.state_dict(keep_vars=True).items() if own and name.endswith(own)}
    if not missing:
        return
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False, **where)
    files = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values() if index else [SAFE_WEIGHTS_NAME]
    for file in sorted(set(files)):
        with safe_open(cached_file(path, file, **where), framework="pt") as weights:
            for key in [key for key in weights.keys() if key.endswith(own)]:  # noqa: SIM118 - it is no dict
                for name in [name for name in missing if name.endswith(key) or key.endswith(name)]:
                    missing.pop(name).data.copy_(weights.get_tensor(key))
    if missing:
        raise PatchError(f"The checkpoint has no {quoted(missing)}, which its patch says that it has.")


def load_adapter(
    path: Path, auto_class: Any, base: str | os.PathLike[str] | None, from_pretrained_kwargs: dict[str, Any]
) -> nn.Module:
    """Base, patch, adapter and gate, in this order.

    Raises:
        PatchError: the base is not known, or is already patched otherwise than the adapter was trained for.
    """
    from peft import PeftModel

    named = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not (base or named):
        raise PatchError(f"{str(path / ADAPTER_CONFIG)!r} names no base model. Say where it is: give `base`.")
    model = load_pretrained(base or named, auto_class, **from_pretrained_kwargs)
    wanted, present = read_record(path), record_of(model)
    if present is not None and wanted is not None and not is_same_patch(present.to_dict(), wanted.to_dict()):
        raise PatchError(
            f"The adapter was trained with {wanted.describe()}, but its base model has {present.describe()}. "
            "Load the adapter on the base that it was trained on."
        )
    if wanted is not None and present is None:
        replay(model, wanted)
    load_trained(model, path)
    adapted = PeftModel.from_pretrained(model, path)
    return gate_adapter(adapted) if is_for_gated(path) else adapted


def load_trained(model: nn.Module, directory: Path) -> None:
    """Loads what was trained of a patch (slopes, biases) from beside an adapter; nothing to do where nothing was."""
    if (directory / OWN_WEIGHTS).is_file():
        root = root_model(model)
        for name, value in load_file(directory / OWN_WEIGHTS).items():
            root.get_parameter(name).data.copy_(value)


def is_same_patch(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two records ask for the same change; the version that wrote them does not matter."""
    return {**one, "version": ""} == {**other, "version": ""}


def export_config(model: nn.Module, layout: str = "v5") -> PreTrainedConfig:
    """A copy of a model's config to save for other readers; the model is not changed.

    `layout="v4"` writes the words of transformers 4 beside those of 5: `rope_theta` at the top and `rope_scaling` with
    `type` and `rope_type`, with the same values as `rope_parameters`, so that neither reader falls back to a default.

    Args:
        model: a transformers model, patched or not.
        layout: "v5" or "v4" (both layouts in one file).

    Returns:
        A config; `.save_pretrained(folder)` writes `config.json`.

    Raises:
        ValueError: unknown layout, or rope parameters for each layer type, which transformers 4 has no words for.
        PatchError: the patch has no words in any config (`record_of(model).native` is None).
    """
    check_choice("layout", layout, LAYOUTS)
    root = root_model(model)
    record = record_of(root)
    if record is not None and record.native is None:
        raise PatchError(
            f"{record.describe()} cannot be said in a config. Save the model with `save_pretrained` and load it with "
            "`hf_posext.load_pretrained`."
        )
    config = copy.deepcopy(root.config)
    if layout == "v4":
        write_v4(text_part(config))
    return config


def write_v4(config: PreTrainedConfig) -> None:
    """Adds `rope_theta` and `rope_scaling` to a config that has `rope_parameters`.

    Raises:
        ValueError: rope parameters differ by layer type.
    """
    blocks = rope_blocks(config)
    if len(blocks) > 1 or (blocks and config.rope_parameters is not blocks[0]):
        raise ValueError("This model has rope parameters for each layer type; transformers 4 has no layout for that.")
    if blocks:
        v4_fields(config, blocks[0])


def v4_fields(config: PreTrainedConfig, block: dict[str, Any]) -> None:
    """Puts one rope block at the top of a config in the words of transformers 4."""
    scaling = {key: value for key, value in block.items() if key not in ("rope_theta", "partial_rotary_factor")}
    is_plain = scaling.get("rope_type", "default") == "default"
    vars(config)["rope_theta"] = float(block["rope_theta"])
    if "partial_rotary_factor" in block:
        vars(config)["partial_rotary_factor"] = block["partial_rotary_factor"]
    vars(config)["rope_scaling"] = None if is_plain else {"type": scaling["rope_type"], **copy.deepcopy(scaling)}
