"""Rotary modules that hold `inv_freq` buffers: one for the whole model, one per layer, or one buffer per layer type."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from hf_posext.compat import rope_block
from hf_posext.contract import RotaryChange, Site, Spectrum
from hf_posext.mechanisms import alibi
from hf_posext.mechanisms._held import Intact, hold, holder_of, original_class, release, write_buffer
from hf_posext.mechanisms._scope import Scoped

MECHANISM = "rotary"
SUFFIX = "inv_freq"
# Types whose `forward` overwrites the buffer as the input grows; the buffer of origin is kept beside it.
LENGTH_DEPENDENT = ("dynamic", "longrope")


def find(scoped: Scoped) -> list[Site]:
    """The sites of one module: each 1-D floating `inv_freq` buffer that has its own attention scaling.

    Other modules with an `inv_freq` (time embeddings, boxes, speech encoders) have no such scaling. A model that uses
    its linear bias does not rotate, though it may have the module.
    """
    if getattr(scoped.module, "rope_type", None) == "axial":  # two-dimensional grids of a standalone vision model
        return []
    sites = []
    for field, buffer in scoped.module.named_buffers(recurse=False):
        label = field.removesuffix(SUFFIX).rstrip("_")
        if not field.endswith(SUFFIX) or label.endswith(("original", "long")):
            continue
        if buffer.dim() == 1 and buffer.is_floating_point() and hasattr(scoped.module, scaling_name(label)):
            sites.append(Site(MECHANISM, scoped.name, scoped.module, scoped.config, label, field))
    return sites if sites and not alibi.in_use(scoped.owner) else []


def scaling_name(label: str) -> str:
    """Name of the attribute that multiplies cos and sin."""
    return f"{label}_attention_scaling" if label else "attention_scaling"


def module_config(site: Site) -> PreTrainedConfig:
    """The config that the module itself reads, else that of its model."""
    return getattr(site.module, "config", None) or site.config


def rope_type(site: Site) -> str:
    """The scaling type that the module runs with."""
    kind = getattr(site.module, "rope_type", None)
    return (kind.get(site.label) if isinstance(kind, dict) else kind) or "default"


def rebuild(site: Site, config: PreTrainedConfig) -> nn.Module:
    """A fresh module of the site's class on the CPU: what transformers makes of a config."""
    with torch.device("cpu"):
        return original_class(site.module)(config)


def read(site: Site, trained_length: int) -> Spectrum:
    """The live spectrum. Bits that a cast took away, or that a meta device never had, come from a fresh module."""
    config = module_config(site)
    block = rope_block(config, site.label) or {}
    scaling = float(getattr(site.module, scaling_name(site.label)))
    holder = holder_of(site.module)
    if holder is not None and site.field in holder.inv_freq:
        kept = holder.inv_freq[site.field]
        return Spectrum(kept, scaling, trained_length, base_of(config, block, kept))
    field = site.field
    kind = rope_type(site)
    if kind in LENGTH_DEPENDENT:
        field = site.field.removesuffix(SUFFIX) + f"original_{SUFFIX}"
    live = getattr(site.module, field)
    if live.is_meta or live.dtype != torch.float32:
        exact = getattr(rebuild(site, config), field)
        if live.is_meta or torch.equal(exact.to(live.dtype), live.cpu()):
            live = exact
    inv_freq = live.detach().cpu().double()
    if kind == "longrope":  # a static stretch replaces the list used beyond N, not the one for short text
        short, long = (torch.tensor(block[name], dtype=torch.float64) for name in ("short_factor", "long_factor"))
        inv_freq = inv_freq * short / long
    return Spectrum(inv_freq, scaling, trained_length, base_of(config, block, inv_freq))


def read_short(site: Site, spectrum: Spectrum) -> Tensor:
    """The frequencies that the module uses for short text, [F] float64, rounded where a cast has rounded them."""
    field = site.field
    holder = holder_of(site.module)
    if holder is not None and field in holder.inv_freq:
        return holder.inv_freq[field]
    if rope_type(site) in LENGTH_DEPENDENT:
        field = field.removesuffix(SUFFIX) + f"original_{SUFFIX}"
    live = getattr(site.module, field)
    return spectrum.inv_freq if live.is_meta else live.detach().cpu().double()


def short_length(site: Site) -> int | None:
    """Up to how many tokens a checkpoint whose own type switches lists uses the one for short text; None without."""
    if rope_type(site) != "longrope":
        return None
    config = module_config(site)
    block = rope_block(config, site.label) or {}
    return block.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)


def base_of(config: PreTrainedConfig, block: dict[str, Any], inv_freq: Tensor) -> float:
    """theta as the config states it, else as the live spectrum implies it."""
    stated = block.get("rope_theta") or getattr(config, "rope_theta", None)
    return float(stated) if stated else implied_base(inv_freq)


def implied_base(inv_freq: Tensor) -> float:
    """theta of the geometric spectrum with the same ends: (first / last)^(F / (F - 1))."""
    live = inv_freq[inv_freq > 0]
    if live.numel() < 2:
        return 10_000.0
    return float((live[0] / live[-1]) ** (live.numel() / (live.numel() - 1)))


def turns_as(module: nn.Module, label: str, change: RotaryChange, positions: Sequence[int]) -> bool | None:
    """Whether the module's cos and sin at some positions are those of a change; None where its output cannot be read.

    Layouts differ (halves, pairs, one of each, sections, another order, complex numbers), the values do not.
    """
    if any(True for _ in module.parameters(recurse=False)):
        return None  # learned numbers of its own have a part in how it turns
    parameters = inspect.signature(module.forward).parameters
    ids = torch.tensor([positions], device=next(module.buffers()).device)
    named = {"layer_type": label} if label and "layer_type" in parameters else {}
    try:
        outputs = module(torch.zeros(1, len(positions), 1, device=ids.device, dtype=torch.float32), ids, **named)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
        return None
    tensors = [tensor for tensor in (outputs if isinstance(outputs, tuple) else (outputs,)) if torch.is_tensor(tensor)]
    cosine = (torch.tensor(positions, dtype=torch.float64)[:, None] * change.inv_freq).cos() * float(
        change.attention_scaling
    )
    readable = [(tensor.real if tensor.is_complex() else tensor).double().cpu() for tensor in tensors]
    expected = {width: cosine.repeat(1, width // cosine.shape[1]).sort().values for width in widths(cosine)}
    pairs = [
        (tensor.sort().values, expected[tensor.shape[-1]])
        for tensor in readable
        if tensor.shape[-2:-1] == cosine.shape[:1] and tensor.shape[-1] in expected
    ]
    if not pairs:
        return None
    return any(torch.allclose(tensor, wanted.expand_as(tensor), atol=1e-5) for tensor, wanted in pairs)


def widths(cosine: Tensor) -> tuple[int, int]:
    """Last sizes that a module's cos may have: one value for each frequency, or one for each channel that it turns."""
    return cosine.shape[1], 2 * cosine.shape[1]


def is_scaling_state(name: str) -> bool:
    """Whether an attribute of a rotary module says how it scales."""
    return name in ("rope_type", "rope_init_fn", "long_inv_freq") or name.endswith("attention_scaling")


class RotaryHolder(Intact):
    """What a patched rotary module keeps: its frequencies in float64 and what it was before."""

    def __init__(self, module: nn.Module) -> None:
        self.original_class = type(module)
        self.inv_freq: dict[str, Tensor] = {}
        self.scaling: dict[str, float] = {}
        self.attributes: dict[str, Any] = {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in module.__dict__.items()
            if is_scaling_state(name)
        }
        # not `named_buffers`: after a long input one tensor may stand under two names, and it would give only the first
        self.buffers = {name: buffer.detach().clone() for name, buffer in module._buffers.items() if buffer is not None}
        self.on_meta: set[str] = set()

    def rewrite(self, module: nn.Module) -> None:
        """Writes the kept frequencies as float32, and other buffers that have just come from meta, without values."""
        for field, inv_freq in self.inv_freq.items():
            write_buffer(module, field, inv_freq, torch.float32)
        on_meta = {name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
        for name in self.on_meta - on_meta - self.inv_freq.keys():
            device = module._buffers[name].device  # type: ignore[union-attr]
            module._buffers[name] = self.original(module, name).to(device, copy=True)
        self.on_meta = on_meta

    def original(self, module: nn.Module, name: str) -> Tensor:
        """What a buffer was before the patch; what the class makes of its config where it had no values."""
        value = self.buffers[name]
        if not value.is_meta:
            return value
        with torch.device("cpu"):
            return getattr(self.original_class(module.config), name)

    def is_intact(self, module: nn.Module) -> bool:
        """Whether all kept buffers are float32 still."""
        return all(module._buffers[field].dtype is torch.float32 for field in self.inv_freq)  # type: ignore[union-attr]

    def rope_parameters(self, label: str | None) -> tuple[Tensor, float]:
        """Frequencies and scaling of a layer type; of an unpatched one, those that it had."""
        field = f"{label}_{SUFFIX}" if label and f"{label}_{SUFFIX}" in self.buffers else SUFFIX
        if field in self.inv_freq:
            return self.inv_freq[field], self.scaling[field]
        return self.buffers[field], float(self.attributes[scaling_name(label or "")])


def write(site: Site, change: RotaryChange) -> None:
    """Puts a change into the module; the type becomes "default", so that nothing recomputes the buffer."""
    module: Any = site.module
    holder: RotaryHolder = holder_of(module) or RotaryHolder(module)
    holder.inv_freq[site.field] = change.inv_freq
    holder.scaling[site.field] = float(change.attention_scaling)
    setattr(module, scaling_name(site.label), float(change.attention_scaling))
    kind = getattr(module, "rope_type", None)
    if isinstance(kind, dict):
        module.rope_type = {**kind, site.label: "default"} if site.label in kind else kind
    elif kind is not None:
        module.rope_type = "default"
    hold(module, holder)
    if "rope_init_fn" in module.__dict__:  # a forward that asks this for frequencies ignores the buffer
        module.rope_init_fn = module.compute_default_rope_parameters


def restore(site: Site) -> None:
    """Gives the module back its class, attributes and buffers, bit for bit, on the device where it is now."""
    module, holder = site.module, holder_of(site.module)
    if holder is None:
        return
    release(module)
    for name in [n for n in module.__dict__ if n.endswith("long_inv_freq") and n not in holder.attributes]:
        del module.__dict__[name]
    module.__dict__.update(holder.attributes)
    for name, value in holder.buffers.items():
        device = module._buffers[name].device  # type: ignore[union-attr]
        module._buffers[name] = value if device.type == "meta" else holder.original(module, name).to(device)


def silence(site: Site, target_length: int) -> None:
    """Rotation by angle 0."""
    spectrum = read(site, target_length)
    write(site, RotaryChange(torch.zeros_like(spectrum.inv_freq), spectrum.attention_scaling))


def reset(model: nn.Module, site: Site) -> None:
    """Makes an unpatched module what its class makes of its config now, on the device where it is."""
    fresh = rebuild(site, module_config(site))
    site.module.__dict__.update({name: value for name, value in fresh.__dict__.items() if is_scaling_state(name)})
    for name, value in fresh.named_buffers(recurse=False):
        present = site.module._buffers[name]
        site.module._buffers[name] = value.to(present.device)  # type: ignore[union-attr]
