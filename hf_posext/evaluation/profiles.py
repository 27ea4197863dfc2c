"""What attention makes of the distance between two tokens, for any encoding that is about distances.

Biases are asked of attention itself: of the adapter that a patch has put there, of the module that holds the table, or
of what a forward hands its first attention. Rotations and mapped distances follow from the numbers in force.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_posext import mechanisms
from hf_posext.attention.biased import ByDistance
from hf_posext.attention.interface import ADAPTER
from hf_posext.attention.remapped import Remapped
from hf_posext.contract import Site
from hf_posext.errors import quoted
from hf_posext.evaluation.spectra import frequencies_of, label_of, rotary_sites
from hf_posext.evaluation.standing import read_twice
from hf_posext.mechanisms import alibi, relative_bias
from hf_posext.mechanisms._scope import scoped_modules

POINTS = 512  # distances on each side
LONGEST_FORWARD = 2048  # tokens of the text that a model is given, whose mask grows with their square
BIAS, SEEN, ROTATION = "bias", "seen", "rotation"


@dataclass(frozen=True)
class Profile:
    """One function of the distance.

    Attributes:
        kind: "bias", what is added to the logit; "seen", the distance in tokens that a rotation meets; "rotation", the
            mean over channel pairs of the cosine of their angle, which is 1 for equal positions.
        part: what has this profile, where there are several: a layer type, or a side of an encoder-decoder.
        distances: [D] int64, position of the query minus that of the key; negative where the key is behind it.
        values: [H, D] float64, one line for each head, or a single one for all; -inf where a key is not seen.
        is_measured: whether attention itself was asked, and not a formula with the numbers in force.
    """

    kind: str
    part: str
    distances: Tensor
    values: Tensor
    is_measured: bool


@dataclass(frozen=True)
class ProfileReading:
    """What `profiles_of` gives.

    Attributes:
        name: of the patch, method and factor; "as given" without one.
        trained_length: N in tokens, None where it is not known.
        reach: tokens of the longest text that was looked at.
        before: profiles of the model as it was given.
        after: those with the patch in force, none without one.
    """

    name: str
    trained_length: int | None
    reach: int
    before: tuple[Profile, ...]
    after: tuple[Profile, ...]


def profiles_of(
    model: nn.Module,
    method: str | None = None,
    factor: float | None = None,
    *,
    reach: int | None = None,
    **arguments: Any,
) -> ProfileReading:
    """What attention makes of distances before and after a patch, in its first layer; the model is left as it was.

    A temperature, which does not depend on the distance, is left out. Grouped distances are those of the last query.

    Args:
        model: a transformers model; of a patched one that patch is read if no method is given.
        method: to look at, for a model that is not patched.
        factor: s, as for `patch_model`.
        reach: tokens of the longest text; if None the target length, and N without a patch.
        arguments: others of `patch_model`.

    Raises:
        TypeError, ValueError: a bad value, or a model that says nothing by distance alone.
        NoSiteError, PatchError: as by `patch_model`.

    Source: RoFormer (arXiv 2104.09864), sec. 3.4.3, for the decay of the mean cosine.
    """
    found = read_twice(model, read, method, factor, reach=reach, **arguments)
    after = found.after or ()
    if not found.before and not after:
        kinds = sorted({site.mechanism for site in mechanisms.find_sites(model)})
        raise ValueError(
            f"Nothing in the attention of {type(model).__name__} depends on the distance alone; it has "
            f"{quoted(kinds)}. Draw its table instead."
        )
    return ProfileReading(found.name, found.trained_length, found.reach, found.before, after)


def read(model: nn.Module, reach: int) -> tuple[Profile, ...]:
    """All profiles of a model as it is."""
    with torch.no_grad():
        return (
            *of_rotations(model, reach),
            *of_adapters(model, reach),
            *of_tables(model, reach),
            *of_alibi(model, reach),
        )


def distances_to(reach: int, is_causal: bool) -> Tensor:
    """Whole distances within a text, evenly spread; those to keys behind the query only where they are seen."""
    ahead = torch.from_numpy(np.unique(np.linspace(0, reach - 1, min(POINTS, reach)).round().astype(np.int64)))
    return ahead if is_causal else torch.cat((-ahead.flip(0)[:-1], ahead))


def of_rotations(model: nn.Module, reach: int) -> Iterator[Profile]:
    """The mean cosine of each spectrum, by the distance that attention meets; and that distance where it is mapped."""
    remapped = [each for _, each in first_adapters(model, Remapped)]
    frequencies = frequencies_of(model, reach)
    known: dict[tuple[Any, ...], Site] = {}
    for site in rotary_sites(model):
        known.setdefault((site.label, *frequencies[str(site)].tolist()), site)
    for site in known.values():
        inv_freq = frequencies[str(site)]
        adapter = next((each for each in remapped if torch.equal(each.inv_freq, inv_freq)), None)
        distances = distances_to(reach, adapter is None or adapter.is_causal)
        seen = distances.double() if adapter is None else seen_by(adapter, distances, reach)
        if adapter is not None:
            yield Profile(SEEN, label_of(site), distances, seen[None], is_measured=True)
        mean = (seen[:, None] * inv_freq).cos().mean(1)
        yield Profile(ROTATION, label_of(site), distances, mean[None], is_measured=False)


def seen_by(adapter: Remapped, distances: Tensor, reach: int) -> Tensor:
    """[D] float64: the distances that the last query of a text meets, by the adapter's own map.

    Keys that would stand behind the last query are those of a text as much longer.
    """
    remap = adapter.remap
    size = max(1, -((remap.window - reach) // (remap.trained_length - remap.window))) if remap.follows else remap.group
    groups = torch.tensor([size]) if size else None
    query, keys = torch.full((1, 1, 1), reach - 1), (reach - 1 - distances)[None, None]
    side = distances.sign()[None, None]
    far = adapter.mapped(query, groups) + side * adapter.shift(groups) - adapter.mapped(keys, groups)
    return torch.where(distances.abs() < remap.window, distances.double(), far[0, 0])


def of_adapters(model: nn.Module, reach: int) -> Iterator[Profile]:
    """What the adapters of a patch add, asked of that of the first layer for the last query, as in `seen_by`."""
    for module, adapter in first_adapters(model, ByDistance):
        distances = distances_to(reach, adapter.is_causal)
        device = next(module.parameters()).device
        query, keys = torch.full((1, 1), reach - 1, device=device), (reach - 1 - distances)[None].to(device)
        biases = adapter.added(module, query, keys)[0, :, 0]
        yield Profile(BIAS, "", distances, biases.double().cpu(), is_measured=True)


def first_adapters(model: nn.Module, kind: type) -> list[tuple[nn.Module, Any]]:
    """The first attention module with an adapter of some kind, for each direction of attention."""
    found: dict[bool, tuple[nn.Module, Any]] = {}
    for module in model.modules():
        adapter = module.__dict__.get(ADAPTER)
        if isinstance(adapter, kind):
            found.setdefault(adapter.is_causal, (module, adapter))  # type: ignore[attr-defined]
    return list(found.values())


def of_tables(model: nn.Module, reach: int) -> Iterator[Profile]:
    """Biases that a module looks up for a number of queries and keys (T5 and its kin): of one query, and of one key."""
    first: dict[bool, Any] = {}
    for site in mechanisms.find_sites(model):
        ask = getattr(site.module, "compute_bias", None)
        if site.mechanism == relative_bias.MECHANISM and ask is not None and counts_both(ask):
            first.setdefault(bool(getattr(site.module, "is_decoder", False)), ask)
    for is_causal, ask in first.items():
        distances = distances_to(reach, is_causal)
        before, behind = ask(reach, 1)[0, :, :, 0], ask(1, reach)[0, :, 0]  # [H, T], from distance 0 on
        values = torch.cat((behind.flip(1)[:, :-1], before), dim=1).double().cpu()
        part = "" if len(first) == 1 else "decoder" if is_causal else "encoder"
        yield Profile(BIAS, part, distances, values[:, distances + reach - 1], is_measured=True)


def counts_both(function: Any) -> bool:
    """Whether a function is asked for a number of queries and one of keys."""
    return list(inspect.signature(function).parameters)[:2] == ["query_length", "key_length"]


class _Handed(Exception):  # noqa: N818 - it ends a forward early, nothing went wrong
    """Carries the bias that an attention module was about to add."""

    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.bias = bias


def of_alibi(model: nn.Module, reach: int) -> Iterator[Profile]:
    """The linear bias that a forward hands its first attention, divided as a patch says."""
    sites = [site for site in mechanisms.find_sites(model) if site.mechanism == alibi.MECHANISM]
    for site in sites[:1]:
        bias = handed(model, site, min(reach, LONGEST_FORWARD))  # [H, S], of the last query
        bias = bias - bias[:, -1:]
        distances = distances_to(bias.shape[1], is_causal=True)
        yield Profile(BIAS, "", distances, bias.flip(1)[:, distances], is_measured=True)


def handed(model: nn.Module, site: Site, tokens: int) -> Tensor:
    """[H, S] float64: what the last query of a text gets added, up to a number for each head."""
    owner = next(each.owner for each in scoped_modules(model) if each.module is site.module)
    names = tuple(inspect.signature(site.module.forward).parameters)

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        holder = mechanisms.holder_of(module)
        given |= {} if holder is None else holder.changed(module, given)
        raise _Handed(added(module, given, site.field))

    hook = site.module.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        owner(torch.ones(1, tokens, dtype=torch.int64, device=next(owner.parameters()).device), use_cache=False)
    except _Handed as found:
        return found.bias
    finally:
        hook.remove()
    raise RuntimeError(f"{site} did not run in a forward of {type(owner).__name__}.")


def added(module: Any, given: dict[str, Any], field: str) -> Tensor:
    """[H, S] float64: the bias [H, 1, S] as it is handed on.

    One of four dimensions (Falcon) is in the mask [1, H, L, S], and added to the scores again where weights are made.
    """
    bias = given[field].double().cpu()
    if bias.dim() == 3:
        return bias[:, -1]
    masked = given[alibi.MASK][0, :, -1].double().cpu()
    return masked + bias[0, :, -1] * module.inv_norm_factor if alibi.adds_bias(module, given) else masked
