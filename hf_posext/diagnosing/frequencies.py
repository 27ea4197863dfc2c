"""Rotary modules by themselves: precision of their angles, what they turn by at far positions, and unseen angles."""

from __future__ import annotations

import inspect
import math

import torch
from torch import Tensor, nn

from hf_posext import mechanisms
from hf_posext.compat import quiet
from hf_posext.contract import Site
from hf_posext.diagnosing.finding import NOTE, OK, WRONG, Finding, NotApplicableError
from hf_posext.diagnosing.subject import Subject
from hf_posext.errors import quoted
from hf_posext.mechanisms import rotary
from hf_posext.probe import unmoved

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def frequencies_of(site: Site) -> Tensor:
    """[F] float64, the buffer that a module turns short text by, rounded as it is."""
    field = site.field
    if rotary.rope_type(site) in rotary.LENGTH_DEPENDENT:
        field = field.removesuffix(rotary.SUFFIX) + f"original_{rotary.SUFFIX}"
    return getattr(site.module, field).detach().cpu().double()


def rebuilt(site: Site) -> nn.Module:
    """A fresh module of the site's class from the config of its model.

    Raises:
        NotApplicableError: the class cannot be made from a config alone.
    """
    try:
        with quiet():
            return rotary.rebuild(site, site.config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise NotApplicableError(f"{site} cannot be made again from the config ({error}).") from error


def exact_frequencies(site: Site) -> Tensor:
    """[F] float64, what the buffer of a site should hold: what its patch keeps, else what the config gives."""
    holder = mechanisms.holder_of(site.module)
    if holder is not None and site.field in holder.inv_freq:
        return holder.inv_freq[site.field]
    module = rebuilt(site)
    return frequencies_of(Site(site.mechanism, site.name, module, site.config, site.label, site.field))


def angles(subject: Subject) -> Finding:
    """Whether frequencies have kept their 24 bits: an error of theirs grows with the position.

    Raises:
        NotApplicableError: no rotary module with frequencies.
    """
    sites = subject.with_frequencies
    rounded, worst = {}, 0.0
    for site in sites:
        live, exact = frequencies_of(site), exact_frequencies(site)
        kind = rounded_to(live, exact)
        if kind is not None:
            rounded[str(site)] = kind
            worst = max(worst, float((live - exact).abs().max()) * (subject.target - 1))
    measured = {"rounded": rounded, "angle_error_at_target": worst}
    if not rounded:
        return Finding("angles", OK, measured, "The frequencies have the precision of float32.")
    return Finding(
        "angles",
        WRONG,
        measured,
        f"The frequencies of {quoted(rounded)} were rounded to {sorted(set(rounded.values()))[0]}: at position "
        f"{subject.target - 1} an angle is off by {worst:.2g} radians.",
        "Load with `from_pretrained(..., dtype=...)` in place of `.to(dtype)` or `.half()`, which round buffers, or "
        "patch the model before you cast it.",
    )


def rounded_to(live: Tensor, exact: Tensor) -> str | None:
    """Name of the 16 bit type that frequencies were rounded to; None for none."""
    if live.shape != exact.shape or torch.equal(live.float(), exact.float()):
        return None
    return next((name for name, kind in HALVES.items() if torch.equal(live, exact.to(kind).double())), None)


def turns(subject: Subject) -> Finding:
    """Whether cos and sin at positions up to T are those of the module's own frequencies.

    Raises:
        NotApplicableError: no rotary module whose output can be read.
    """
    sites = subject.rotary
    length, known = subject.short_length, subject.trained_length or subject.target
    spread = {0, 1, 2, 7, known // 2, known - 1, known, known + 1, length // 2, length - 2, length - 1}
    positions = sorted(position for position in spread if 0 <= position < length)
    errors: dict[str, float] = {}
    for site in sites:
        wrong = turning_errors(site, positions)
        if wrong is not None:
            errors[str(site)] = float(wrong.max())
            first = next((p for p, error in zip(positions, wrong.tolist(), strict=True) if error > 0), None)
            if first is not None:
                return Finding(
                    "turns",
                    WRONG,
                    {"errors": errors, "first_wrong_position": first, "positions": positions},
                    f"{site} gives cos and sin at position {first} that are not those of its frequencies (positions "
                    "cut off, repeated or taken from elsewhere).",
                    "Look for a wrapper or a cache of cos and sin around this module that was made for shorter text.",
                )
    if not errors:
        raise NotApplicableError("The cos and sin of the rotary modules cannot be read from outside.")
    return Finding("turns", OK, {"errors": errors, "positions": positions}, "Every angle is position times frequency.")


def turning_errors(site: Site, positions: list[int]) -> Tensor | None:
    """[P], by how much cos is off at each position where it is by more than rounding, else 0; None if unreadable."""
    spectrum = mechanisms.read_spectrum(site, 1)
    live = spectrum.inv_freq if mechanisms.is_finite(site) else frequencies_of(site)
    expected = (torch.tensor(positions).double()[:, None] * live).cos() * spectrum.attention_scaling  # [P, F]
    found = cosines(site, positions, torch.float32)
    if found is None:
        return None
    repeats = found.shape[-1] // expected.shape[-1]
    wanted = expected.repeat(1, repeats).sort().values
    off = (found.sort().values - wanted).abs().amax(dim=-1)
    off = off.reshape(-1, len(positions)).amax(dim=0)
    rounding = 4 * torch.finfo(torch.float32).eps * torch.tensor(positions) + half_table(site)
    return torch.where(off > 1e-3 + rounding, off, 0.0)


def half_table(site: Site) -> float:
    """Rounding of sines and cosines that are kept in a table, 0 for frequencies."""
    values = getattr(site.module, site.field)
    return 4 * torch.finfo(values.dtype).eps if mechanisms.is_finite(site) else 0.0


def cosines(site: Site, positions: list[int], dtype: torch.dtype) -> Tensor | None:
    """[..., P, F or 2F] float64, the first output of a rotary module that can be its cos; None where none can be."""
    width = mechanisms.read_spectrum(site, 1).inv_freq.numel()
    module = site.module
    if mechanisms.is_finite(site):
        table = getattr(module, site.field).detach().cpu().double()
        return table[positions][:, width:] if max(positions) < len(table) else None
    if any(True for _ in module.parameters(recurse=False)):
        return None  # learned numbers of its own have a part in how it turns
    device = getattr(module, site.field).device
    ids = torch.tensor([positions], device=device)
    takes_label = site.label and "layer_type" in inspect.signature(module.forward).parameters
    named = {"layer_type": site.label} if takes_label else {}
    try:
        with unmoved([site]):
            output = module(torch.zeros(1, len(positions), 1, device=device, dtype=dtype), ids, **named)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
        return None
    outputs = output if isinstance(output, tuple) else (output,)
    tensors = [(each.real if each.is_complex() else each) for each in outputs if torch.is_tensor(each)]
    fitting = [each for each in tensors if each.shape[-2:] in ((len(positions), width), (len(positions), 2 * width))]
    return closest_to_cosine(fitting) if fitting else None


def closest_to_cosine(tensors: list[Tensor]) -> Tensor:
    """The one that is largest at its first position, where angles are 0 if that position is 0."""
    return max(tensors, key=lambda each: float(each[..., 0, :].sum())).detach().double().cpu()


def channels(subject: Subject) -> Finding:
    """Channel pairs that meet angles at T that they have never met within N.

    A channel that completes a turn within N has met every angle; one that does not meets new ones beyond.

    Raises:
        NotApplicableError: no rotary module with frequencies, or N is not known.
    """
    sites = subject.with_frequencies
    if subject.acts_in_attention:
        raise NotApplicableError("The patch acts in attention, so that frequencies alone do not say what is met.")
    target = subject.target
    length = subject.trained_length or target
    counts = {str(site): unseen(site, length, target) for site in sites}
    measured = {"unseen": counts, "trained_length": length, "target_length": target}
    if not any(counts.values()):
        return Finding("channels", OK, measured, f"Up to {target} tokens no channel meets an angle that is new to it.")
    return Finding(
        "channels",
        NOTE,
        measured,
        f"{max(counts.values())} channel pairs meet angles before token {target} that they never met within {length}.",
        "Tune the model at this length, or choose a method that interpolates these channels (`pi`, `yarn`).",
    )


def unseen(site: Site, length: int, target: int) -> int:
    """Channel pairs that turn further by T than they ever did by N, without having completed a turn."""
    holder = mechanisms.holder_of(site.module)
    live = mechanisms.read_spectrum(site, length).inv_freq
    trained = holder.buffers.get(site.field) if holder is not None else None
    before = live if trained is None or trained.is_meta else trained.detach().cpu().double()
    reached, known = live * target, before * length
    return int(((known < 2 * math.pi) & (reached > known * (1 + 1e-6))).sum())
