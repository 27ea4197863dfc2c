"""Wavelengths of the rotary channels of a model, as it was given and with a patch in force."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posext import mechanisms
from hf_posext.attention.reading import readers
from hf_posext.attention.scaling import Dynamics
from hf_posext.errors import quoted
from hf_posext.evaluation.standing import read_twice
from hf_posext.mechanisms import rotary


@dataclass(frozen=True)
class Wavelengths:
    """Those of one rotary site, or of several that are alike, in the order of its channel pairs.

    Attributes:
        label: layer type that the site serves, empty where all layers share it.
        before: [F] in tokens as the model was given; infinite for a pair that does not turn.
        after: the same with the patch in force; as before where it leaves the site alone.
    """

    label: str
    before: tuple[float, ...]
    after: tuple[float, ...]


@dataclass(frozen=True)
class SpectrumReading:
    """What `spectrum_of` gives.

    Attributes:
        name: of the patch, method and factor; "as given" without one.
        trained_length: N in tokens, None where it is not known.
        target_length: T in tokens; N without a patch.
        sites: one for each layer type, and more where sites differ.
    """

    name: str
    trained_length: int | None
    target_length: int
    sites: tuple[Wavelengths, ...]

    def beyond(self, site: Wavelengths) -> list[bool]:
        """Which pairs meet angles at T that they have not met within N, with the wavelengths of `after`.

        One that completes a turn within N has met them all; any other has met those up to 2 pi N / wavelength.
        """
        trained = self.trained_length or self.target_length
        return [
            old > trained and self.target_length / new > trained / old * (1 + 1e-6)
            for old, new in zip(site.before, site.after, strict=True)
        ]

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def spectrum_of(
    model: nn.Module, method: str | None = None, factor: float | None = None, **arguments: Any
) -> SpectrumReading:
    """Wavelengths of each rotary channel pair before and after a patch; the model is left as it was.

    Where the factor follows the length of the text, `after` is what the last token of a text of T tokens meets.

    Args:
        model: a transformers model; of a patched one that patch is read if no method is given.
        method: to look at, for a model that is not patched.
        factor: s, as for `patch_model`.
        arguments: others of `patch_model`: `target_length`, `dynamic`, `layers`, options of the method.

    Raises:
        ValueError: the model does not rotate, or the method leaves its frequencies as they are.
        TypeError, NoSiteError, PatchError: as by `patch_model`.
    """
    found = read_twice(model, frequencies_of, method, factor, **arguments)
    if not found.before:
        kinds = sorted({site.mechanism for site in mechanisms.find_sites(model)})
        raise ValueError(
            f"{type(model).__name__} has no rotary encoding, so no spectrum; it has {quoted(kinds)}. Draw its bias or "
            "its table instead."
        )
    after = found.before if found.after is None else found.after
    if found.after is not None and not any(map(differs, found.before.values(), after.values())):
        raise ValueError(f"{found.name} leaves all frequencies as they are. Draw what it does to distances instead.")
    sites = {
        Wavelengths(label_of(site), wavelengths(found.before[str(site)]), wavelengths(after[str(site)])): None
        for site in rotary_sites(model)
    }
    return SpectrumReading(found.name, found.trained_length, found.reach, tuple(sites))


def differs(before: Tensor, after: Tensor) -> bool:
    """Whether pairs turn, and at another pace than before."""
    return bool(after.any()) and not torch.equal(before, after)


def rotary_sites(model: nn.Module) -> list[Any]:
    """The sites of a model that rotate."""
    return [site for site in mechanisms.find_sites(model) if site.mechanism == rotary.MECHANISM]


def label_of(site: Any) -> str:
    """The layer type of a site in words."""
    return str(site.label).replace("_", " ")


def frequencies_of(model: nn.Module, length: int) -> dict[str, Tensor]:
    """Path of each rotary site -> [F] float64, radians per token, that the last of `length` tokens is rotated by."""
    schedules = {
        name: schedule
        for each in readers(model)
        if isinstance(each, Dynamics)
        for name, schedule in each.schedules.items()
    }
    found = {}
    for site in rotary_sites(model):
        found[str(site)] = mechanisms.read_spectrum(site, length).inv_freq
        if str(site) in schedules:
            schedule = schedules[str(site)]
            inv_freq, _, _ = schedule.changed(torch.tensor(length, device=schedule.base.device))
            found[str(site)] = inv_freq.cpu()
    return found


def wavelengths(inv_freq: Tensor) -> tuple[float, ...]:
    """2 pi / theta in tokens, infinite where theta is 0."""
    return tuple(2 * math.pi / theta if theta else math.inf for theta in inv_freq.tolist())
