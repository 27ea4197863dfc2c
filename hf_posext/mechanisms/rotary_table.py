"""Rotary models that keep a finite table of sines and cosines instead of frequencies: GPT-J, CodeGen, RoFormer."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from hf_posext.compat import quiet
from hf_posext.contract import RotaryChange, Site, Spectrum
from hf_posext.mechanisms._held import Intact, hold, holder_of, release, write_buffer
from hf_posext.mechanisms._scope import Scoped
from hf_posext.mechanisms.rotary import MECHANISM, base_of

SIZE_FIELDS = ("num_embeddings", "max_positions", "max_position_embeddings")  # of the module, equal to the rows


def find(scoped: Scoped) -> list[Site]:
    """A 2-D table [N, R] whose rows are sines and cosines of p theta, as buffer or as fixed embedding of head width.

    The width tells a rotary table from an additive one: it turns (a part of) a head, not the whole hidden state.
    """
    holder = holder_of(scoped.module)
    if isinstance(holder, TableHolder):  # switched off, it does not look like a rotation any more
        return [Site(MECHANISM, scoped.name, scoped.module, scoped.config, "", holder.field)]
    tensors = dict(scoped.module.named_buffers(recurse=False))
    if isinstance(scoped.module, nn.Embedding):
        tensors["weight"] = scoped.module.weight
    return [
        Site(MECHANISM, scoped.name, scoped.module, scoped.config, "", name)
        for name, table in tensors.items()
        if table.dim() == 2 and table.is_floating_point() and is_narrow(table, scoped.config) and is_sin_cos(table)
    ]


def is_narrow(table: Tensor, config: PreTrainedConfig) -> bool:
    """Whether a table is narrower than the hidden state, which an additive one is not."""
    return table.shape[1] < (getattr(config, "hidden_size", None) or 0)


def is_sin_cos(table: Tensor) -> bool:
    """Whether the halves of the rows are sines and cosines of the same angles, from angle 0, all times one number."""
    if table.is_meta or table.shape[0] < 2 or table.shape[1] % 2:
        return False
    sine, cosine = table.detach()[:64].float().chunk(2, dim=1)
    scale = cosine[0, 0]
    is_circle = torch.allclose(sine**2 + cosine**2, (scale**2).expand_as(sine), rtol=0.02)  # bf16 tables included
    return is_circle and bool((sine[0] == 0).all()) and bool((cosine[0] == scale).all()) and bool((sine[1] != 0).any())


def read(site: Site, trained_length: int) -> Spectrum:
    """The frequencies behind the table, found by unwrapping its angles over ever longer strides."""
    holder = holder_of(site.module)
    if holder is not None:
        return Spectrum(holder.inv_freq, holder.scaling, trained_length, base_of(site.config, {}, holder.inv_freq))
    table = getattr(site.module, site.field).detach().cpu().double()
    inv_freq = unwrap(table)
    return Spectrum(inv_freq, float(table[0, -1]), trained_length, base_of(site.config, {}, inv_freq))


def read_short(site: Site, spectrum: Spectrum) -> Tensor:
    """The frequencies for short text, [F] float64: those of the spectrum."""
    return spectrum.inv_freq


def short_length(site: Site) -> int | None:
    """None: no table switches with the length."""
    return None


def unwrap(table: Tensor) -> Tensor:
    """theta, [F] float64, from a table [N, 2F] of sin | cos.

    Row 1 gives theta to the precision of the table. Row 2^k gives 2^k theta modulo one turn, with 2^k times less error
    once the turns are known, and these follow from the estimate so far.
    """
    sine, cosine = table.chunk(2, dim=1)
    inv_freq = torch.atan2(sine[1], cosine[1]).remainder(2 * math.pi)
    row = 2
    while row < table.shape[0]:
        angle = torch.atan2(sine[row], cosine[row])
        turns = ((inv_freq * row - angle) / (2 * math.pi)).round()
        inv_freq = (angle + 2 * math.pi * turns) / row
        row *= 2
    return inv_freq


def build_table(inv_freq: Tensor, rows: int, scaling: float) -> Tensor:
    """[rows, 2F] float64: sines, then cosines, both times the attention scaling."""
    angles = torch.arange(rows, dtype=torch.float64)[:, None] * inv_freq
    return torch.cat((angles.sin(), angles.cos()), dim=1) * scaling


class TableHolder(Intact):
    """What a patched table module keeps: the table as it was, and the spectrum and length of the new one."""

    def __init__(self, site: Site) -> None:
        self.original_class = type(site.module)
        self.field = site.field
        self.original = getattr(site.module, site.field).detach().clone()
        self.attributes: dict[str, int] = {}
        self.inv_freq = torch.empty(0)
        self.scaling, self.rows, self.version = 1.0, 0, 0
        self.keeps_rows = False

    def rewrite(self, module: nn.Module) -> None:
        """Builds the table in float64 and rounds it once, to the dtype that the module now has."""
        table = build_table(self.inv_freq, self.rows, self.scaling)
        if self.keeps_rows:  # the old rows are the model's own rounding of the same angles
            shared = min(self.rows, len(self.original))
            table[:shared] = self.original[:shared].double()
        write_buffer(module, self.field, table, getattr(module, self.field).dtype)
        self.version = getattr(module, self.field)._version

    def is_intact(self, module: nn.Module) -> bool:
        """Whether nothing wrote into the table since: weight initialisation knows only the unpatched one."""
        return getattr(module, self.field)._version == self.version

    def rope_parameters(self, label: str | None) -> tuple[Tensor, float]:
        """Frequencies and scaling."""
        return self.inv_freq, self.scaling


def write(site: Site, change: RotaryChange, rows: int) -> None:
    """Replaces the table by one of `rows` rows of the changed spectrum; the size fields of the module follow."""
    module = site.module
    holder: TableHolder = holder_of(module) or TableHolder(site)
    holder.keeps_rows = torch.equal(change.inv_freq, unwrap(holder.original.cpu().double()))
    holder.inv_freq, holder.scaling, holder.rows = change.inv_freq, float(change.attention_scaling), rows
    old_rows = getattr(module, site.field).shape[0]
    for name in SIZE_FIELDS:
        if module.__dict__.get(name) == old_rows:
            holder.attributes.setdefault(name, old_rows)
            setattr(module, name, rows)
    hold(module, holder)


def restore(site: Site) -> None:
    """Gives the module back its class and its table, bit for bit where no cast happened in between."""
    module, holder = site.module, holder_of(site.module)
    if holder is None:
        return
    present = getattr(module, site.field)
    release(module)
    module.__dict__.update(holder.attributes)
    put_table(module, site.field, holder.original.to(present.device))


def silence(site: Site, target_length: int) -> None:
    """Rows of angle 0, as many as the target has tokens."""
    spectrum = read(site, target_length)
    write(site, RotaryChange(torch.zeros_like(spectrum.inv_freq), spectrum.attention_scaling), target_length)


def reset(model: nn.Module, site: Site) -> None:
    """Makes an unpatched table what its class makes of the config now: fewer rows, the frequencies of origin."""
    base: Any = type(site.module)
    config: Any = site.config
    present = getattr(site.module, site.field)
    with quiet(), torch.device("cpu"):
        if "config" in inspect.signature(base).parameters:
            fresh = base(config)
        else:
            fresh = base(config.max_position_embeddings, present.shape[1])
            fresh.weight.data.copy_(fresh.create_weight())
    site.module.__dict__.update({name: value for name, value in fresh.__dict__.items() if name in SIZE_FIELDS})
    put_table(site.module, site.field, getattr(fresh, site.field).detach().to(present.device, present.dtype))


def put_table(module: nn.Module, field: str, table: Tensor) -> None:
    """Binds a table of any size, as a parameter or a buffer, whichever the module has."""
    present = getattr(module, field)
    if isinstance(present, nn.Parameter):
        setattr(module, field, nn.Parameter(table, requires_grad=present.requires_grad))
    else:
        module._buffers[field] = table
