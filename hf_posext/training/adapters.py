"""What a run trains: a LoRA adapter with norms and embeddings beside it, the new rows of a table, or every weight."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_posext.attention.reading import own_parameters
from hf_posext.errors import PatchError
from hf_posext.mechanisms import find_sites, is_off, is_table, root_model
from hf_posext.mechanisms._scope import scoped_modules
from hf_posext.records import PatchRecord
from hf_posext.training.config import AdapterConfig

ATTENTION = "attention"
DEFAULTS = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": ATTENTION}
LARGE = 4.0  # factor from which norms and embeddings are trained as well where the config does not say


def make_trainable(model: nn.Module, config: AdapterConfig, record: PatchRecord | None) -> nn.Module:
    """Freezes what stays, and gives the model what is trained.

    Args:
        model: the model with its patch, if it has one.
        config: what to train.
        record: of the patch.

    Returns:
        A PEFT model around the model with `lora`, else the model.

    Raises:
        PatchError: no new rows, or rows that training would change as well.
        ValueError: adapters where there are some already, or arguments that PEFT does not take.
    """
    if config.train == "full":
        train_all(model)
        return model
    if config.train == "new_rows":
        train_new_rows(model, record)
        return model
    if hasattr(model, "peft_config"):
        raise ValueError("The model has an adapter already. Merge it first, with `model.merge_and_unload()`.")
    wrapped = add_lora(model, config, 1.0 if record is None else record.factor)
    for _, _, parameter in own_parameters(model):
        parameter.requires_grad_(True)
    return wrapped


def train_all(model: nn.Module) -> None:
    """Trains every weight that text reaches: no tower for images, and nothing that a patch has switched off."""
    model.requires_grad_(False)
    for each in scoped_modules(model):
        if each.is_text:
            for parameter in each.module.parameters(recurse=False):
                parameter.requires_grad_(True)
    for site in filter(is_off, find_sites(model)):
        site.module.requires_grad_(False)


@contextmanager
def in_full_precision(model: nn.Module, *, is_autocast: bool) -> Iterator[None]:
    """Holds what is trained in fp32 under autocast: steps of a small learning rate are below the rounding of bf16.

    On the way out every weight has the dtype that it had, so that what is saved is what the model computes with.
    """
    trained = [each for each in model.parameters() if each.requires_grad and is_autocast]
    kept = [(each, each.dtype) for each in trained if each.dtype in (torch.bfloat16, torch.float16)]
    for parameter, _ in kept:
        parameter.data = parameter.data.float()
    try:
        yield
    finally:
        for parameter, dtype in kept:
            parameter.data = parameter.data.to(dtype)


def train_new_rows(model: nn.Module, record: PatchRecord | None) -> None:
    """Leaves nothing to train but the rows that a patch has added to learned tables.

    Raises:
        PatchError: there are none, or old rows that are not frozen.
    """
    tables = [site for site in find_sites(model) if is_table(site)]
    tables = [site for site in tables if isinstance(getattr(site.module, site.field), nn.Parameter)]
    if record is None or not tables or not set(map(str, tables)) <= set(record.sites):
        raise PatchError(
            f"`adapter.train: new_rows` needs a learned table of positions that a patch has made longer; "
            f"{type(root_model(model)).__name__} has none. Train with `lora`, or patch the table first."
        )
    if not (record.dynamic or record.options.get("frozen_rows")):
        raise PatchError(
            f"`adapter.train: new_rows` needs old rows that are frozen, and {record.describe()} leaves them free. "
            "Patch with frozen_rows=True, or with dynamic=True."
        )
    model.requires_grad_(False)
    for site in tables:
        getattr(site.module, site.field).requires_grad_(True)


def add_lora(model: nn.Module, config: AdapterConfig, factor: float) -> nn.Module:
    """A PEFT model around a model.

    Args:
        model: a transformers model.
        config: what to train.
        factor: s, from which follows whether norms and embeddings are trained where the config does not say.

    Raises:
        ValueError: arguments that PEFT does not take.
    """
    from peft import LoraConfig, TaskType, get_peft_model
    from peft.utils.constants import EMBEDDING_LAYER_NAMES  # the only names for which PEFT ties what is tied

    options: dict[str, Any] = DEFAULTS | config.lora
    whole = list(options.pop("modules_to_save", None) or [])
    is_large = factor >= LARGE
    if is_large if config.norms is None else config.norms:
        whole += norms(model)
    if is_large if config.embeddings is None else config.embeddings:
        whole += embeddings(model)
        options.setdefault("ensure_weight_tying", is_tied(model) and ends_in(whole[-1], EMBEDDING_LAYER_NAMES))
    if options["target_modules"] == ATTENTION:
        options["target_modules"] = attention_projections(model)
    options.setdefault("fan_in_fan_out", any(isinstance(each, Conv1D) for each in model.modules()))
    causal = getattr(root_model(model), "_is_causal_lm", None) or "CausalLM" in type(root_model(model)).__name__
    options.setdefault("task_type", TaskType.CAUSAL_LM if causal else None)
    try:
        lora = LoraConfig(**options, modules_to_save=whole or None)
    except TypeError as error:
        raise ValueError(f"`adapter.lora` is handed to peft.LoraConfig, which says: {error}.") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers under an old name
        return get_peft_model(model, lora)


def merged(model: Any) -> nn.Module:
    """The model with its adapter in its weights, without PEFT; head and embedding part where one was trained alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Input and output embeddings are no longer tied", UserWarning)
        return model.merge_and_unload()


def attention_projections(model: nn.Module) -> list[str]:
    """Linear layers in the attention of the text part, as PEFT takes them: last names, or paths where those are shared.

    Raises:
        ValueError: there are none.
    """
    blocks = [
        each for each in scoped_modules(model) if each.is_text and ATTENTION in type(each.module).__name__.lower()
    ]
    inside = {id(part) for block in blocks for part in block.module.modules() if isinstance(part, nn.Linear | Conv1D)}
    return shortest_names(model, inside, nn.Linear | Conv1D, "attention layers")


def norms(model: nn.Module) -> list[str]:
    """Norms of the text part: modules with nothing but vectors of weights."""
    found = {id(each.module) for each in scoped_modules(model) if each.is_text and is_norm(each.module)}
    return shortest_names(model, found, nn.Module, "norms")


def is_norm(module: nn.Module) -> bool:
    """Whether a module has no parts and no weights but vectors."""
    own = list(module.parameters())
    return bool(own) and not list(module.children()) and all(each.dim() == 1 for each in own)


def embeddings(model: nn.Module) -> list[str]:
    """The embedding of tokens."""
    return shortest_names(model, {id(root_model(model).get_input_embeddings())}, nn.Module, "embedding of tokens")


def is_tied(model: nn.Module) -> bool:
    """Whether head and embedding of tokens are one weight."""
    root = root_model(model)
    head = root.get_output_embeddings()
    return head is not None and head.weight is root.get_input_embeddings().weight


def shortest_names(model: nn.Module, chosen: set[int], kind: Any, what: str) -> list[str]:
    """Names by which PEFT finds some modules and no others: it takes every module whose path ends in one of them.

    Args:
        model: the model.
        chosen: identities of the modules.
        kind: classes among which PEFT may choose.
        what: the modules in words.

    Raises:
        ValueError: there are none.
    """
    named = [(path, module) for path, module in root_model(model).named_modules() if isinstance(module, kind)]
    paths = [path for path, module in named if id(module) in chosen]
    if not paths:
        raise ValueError(
            f"{type(root_model(model)).__name__} has no {what} that could be trained. Name modules in `lora`."
        )
    lasts = {path.rpartition(".")[2] for path in paths}
    return sorted(paths if any(ends_in(path, lasts) for path, _ in named if path not in paths) else lasts)


def ends_in(path: str, names: Iterable[str]) -> bool:
    """Whether a path ends in one of some names, as PEFT asks."""
    return any(path.endswith(name) for name in names)


def count_trainable(model: nn.Module) -> tuple[int, int]:
    """Numbers that are trained, and all numbers."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, is_trained in sizes if is_trained), sum(size for size, _ in sizes)
