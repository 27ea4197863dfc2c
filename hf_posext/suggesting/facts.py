"""What is wanted, and what a live model says about its positions: the numbers that the rules decide by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from hf_posext import mechanisms
from hf_posext.contract import Spectrum
from hf_posext.inspection import PositionReport, SiteReport, inspect_model
from hf_posext.lengths import original_length, rope_blocks, text_part
from hf_posext.mechanisms import logits, rotary

# The first one that a model has decides: a table ends and angles do not, so it is what has to be seen to first.
ORDER = ("learned", "sinusoidal", "rotary", "alibi", "relative_bias", "grid")
PUBLISHED_TURNS = 32  # `beta_fast` of YaRN
SHORTEST_STRETCHED = 32  # tokens: the wavelength from which `beta_fast="auto"` stretches


@dataclass(frozen=True)
class Wanted:
    """What somebody asks for.

    Attributes:
        target_length: T in tokens.
        tuned: whether the model is tuned after the patch.
        portable: whether the saved model has to load in plain transformers.
        short_text: whether text of at most N tokens has to be read as before.
        given_length: N as it was given, None where the config says it.
    """

    target_length: int
    tuned: bool = False
    portable: bool = False
    short_text: bool = True
    given_length: int | None = None


@dataclass(frozen=True)
class Facts:
    """A model as it was given, in numbers.

    Attributes:
        trained_length: N in tokens; of a vision model pixels per side.
        first_length: the very first N, before the scaling that the checkpoint has already.
        scaling: names of that scaling (`rope_type`), empty without one.
        mechanism: what decides the rules, None where no position encoding is known.
        positions: the report of `inspect_model`.
        spectrum: of the first rotary site that is not of layers with a window; None without one.
        scales_logits_itself: whether a temperature cannot go through cos and sin, as in latent attention.
    """

    trained_length: int
    first_length: int
    scaling: tuple[str, ...]
    mechanism: str | None
    positions: PositionReport
    spectrum: Spectrum | None
    scales_logits_itself: bool

    @property
    def unit(self) -> str:
        """What lengths are counted in."""
        return "pixels per side" if self.mechanism == "grid" else "tokens"

    @property
    def rotary(self) -> list[SiteReport]:
        """The sites that rotate."""
        return [site for site in self.positions.sites if site.mechanism == rotary.MECHANISM]

    @property
    def windows(self) -> list[int]:
        """The sliding window of each rotary site that serves layers with one, in tokens."""
        return [site.window for site in self.rotary if site.window]

    @property
    def never_looks_further(self) -> bool:
        """Whether every layer that rotates sees a window of at most N tokens, so that no longer distance occurs."""
        return bool(self.rotary) and len(self.windows) == len(self.rotary) and max(self.windows) <= self.trained_length

    @cached_property
    def turns(self) -> list[float]:
        """Full turns that each channel pair makes within N; empty without a spectrum."""
        if self.spectrum is None:
            return []
        return [self.trained_length * theta / (2 * math.pi) for theta in self.spectrum.inv_freq.tolist()]

    @property
    def incomplete(self) -> int:
        """Pairs that never turn full circle within N tokens, those that do not turn at all left out."""
        return sum(0 < turn < 1 for turn in self.turns)

    @property
    def longest_wavelength(self) -> float:
        """In tokens, of the pairs that turn."""
        return self.trained_length / min((turn for turn in self.turns if turn), default=math.inf)

    @property
    def is_ramp_too_fast(self) -> bool:
        """Whether YaRN's published ramp keeps less than an eighth of the pairs, and one from 32 tokens on keeps more.

        Its 32 turns were chosen for N of 2048 to 4096 tokens; at N = 256 they keep one pair of 32.
        """
        kept = sum(turn >= PUBLISHED_TURNS for turn in self.turns)
        least = self.trained_length / SHORTEST_STRETCHED
        return least > 1 and 8 * kept < len(self.turns) and sum(turn >= least for turn in self.turns) > kept


def read_facts(model: nn.Module, given_length: int | None) -> Facts:
    """The numbers of a model that is not patched.

    Args:
        model: a transformers model.
        given_length: N, where the config does not say it or says it wrong.

    Raises:
        TypeError: not a transformers model.
        ValueError: N is not known.
    """
    positions = inspect_model(model)
    trained = positions.trained_length if given_length is None else given_length
    if trained is None:
        raise ValueError(
            f"The config of {positions.model} does not say the trained length. "
            "Give `original_max_position_embeddings`, the tokens that the model was trained at."
        )
    config = mechanisms.root_model(model).config
    sites = [site for site in mechanisms.find_sites(model) if site.mechanism == rotary.MECHANISM]
    main = next((site for site in sites if not site.is_local), next(iter(sites), None))
    kinds = {site.mechanism for site in positions.sites}
    types = (block.get("rope_type") for block in rope_blocks(text_part(config)))
    return Facts(
        trained_length=trained,
        first_length=original_length(config, trained),
        scaling=tuple(dict.fromkeys(kind for kind in types if kind not in (None, "default"))),
        mechanism=next((kind for kind in ORDER if kind in kinds), None),
        positions=positions,
        spectrum=None if main is None else mechanisms.read_spectrum(main, trained),
        scales_logits_itself=main is not None and logits.scales_logits_itself(main),
    )
