"""The published formulae once more, from the papers, one channel at a time in double precision.

Shares no code with `hf_posext`, and goes another way: from the numbers that a paper names (d rotated channels, base b,
L trained tokens, factor s) to new frequencies, where the package changes live ones. Results are float64, [F] with
F = d / 2.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def geometric(d: int, b: float) -> Vector:
    """theta_i = b^(-2i/d). Source: RoFormer (arXiv 2104.09864), sec. 3.2.2."""
    return np.array([b ** (-2 * i / d) for i in range(d // 2)])


def rotations(theta: float, length: int) -> float:
    """r = L / lambda with the wavelength lambda = 2 pi / theta. Source: YaRN, eq. 17."""
    return length / (2 * math.pi / theta)


def pi(d: int, b: float, s: float) -> Vector:
    """Position m becomes m L / L' = m / s. Source: Chen et al. (arXiv 2306.15595), eq. 4."""
    return np.array([theta / s for theta in geometric(d, b)])


def ntk(d: int, b: float, s: float) -> Vector:
    """b' = b s^(d/(d-2)). Source: YaRN (arXiv 2309.00071), eq. 16."""
    return geometric(d, b * s ** (d / (d - 2)))


def abf(d: int, new_base: float) -> Vector:
    """The base is replaced. Source: Xiong et al. (arXiv 2309.16039), sec. 4.1."""
    return geometric(d, new_base)


def channel_with(turns: float, d: int, b: float, length: int) -> float:
    """The i that has r(i) = turns: d ln(L / (2 pi turns)) / (2 ln b). Source: YaRN, eq. 17, `find_correction_dim`."""
    return d * math.log(length / (2 * math.pi * turns)) / (2 * math.log(b))


def ramp_over_index(d: int, b: float, length: int, fast: float, slow: float, truncate: bool) -> Vector:
    """gamma, 1 for channels that stay, linear in the channel index.

    Ends are rounded outwards if wanted and kept within [0, d - 1]; a ramp without width becomes one of 0.001.
    Source: published code of YaRN (github.com/jquesnelle/yarn), `find_correction_range` and `linear_ramp_mask`.
    """
    first, last = channel_with(fast, d, b, length), channel_with(slow, d, b, length)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, d - 1)
    width = last - first if last != first else 0.001
    return np.array([1 - min(max((i - first) / width, 0), 1) for i in range(d // 2)])


def ramp_over_rotations(d: int, b: float, length: int, fast: float, slow: float) -> Vector:
    """gamma(r): 0 for r < alpha, 1 for r > beta, (r - alpha) / (beta - alpha) between. Source: YaRN, eq. 18."""
    turns = [rotations(theta, length) for theta in geometric(d, b)]
    return np.array([0 if r < slow else 1 if r > fast else (r - slow) / (fast - slow) for r in turns])


def by_parts(d: int, b: float, s: float, gamma: Vector) -> Vector:
    """h(theta) = (1 - gamma) theta / s + gamma theta. Source: YaRN, eq. 19 and 20."""
    return np.array([(1 - g) * theta / s + g * theta for g, theta in zip(gamma, geometric(d, b), strict=True)])


def llama3(d: int, b: float, s: float, length: int, low: float, high: float) -> Vector:
    """By wavelength: kept if shorter than L / high, theta / s if longer than L / low, blended between.

    Source: Llama 3.1 model code, `apply_scaling`.
    """

    def scaled(theta: float) -> float:
        wavelength = 2 * math.pi / theta
        if wavelength < length / high:
            return theta
        if wavelength > length / low:
            return theta / s
        smooth = (length / wavelength - low) / (high - low)
        return (1 - smooth) * theta / s + smooth * theta

    return np.array([scaled(theta) for theta in geometric(d, b)])


def longrope(d: int, b: float, ratios: Sequence[float]) -> Vector:
    """theta_i / lambda_i. Source: LongRoPE (arXiv 2402.13753), eq. 2."""
    return np.array([1 / (ratio * b ** (2 * i / d)) for i, ratio in enumerate(ratios)])


def yarn_attention_factor(s: float) -> float:
    """sqrt(1/t) = 0.1 ln s + 1. Source: YaRN, eq. 22."""
    return 0.1 * math.log(s) + 1 if s > 1 else 1.0


def longrope_attention_factor(s: float, length: int) -> float:
    """sqrt(1 + ln s / ln L). Source: Phi-3 model code, `su` scaling."""
    return math.sqrt(1 + math.log(s) / math.log(length)) if s > 1 else 1.0


def longrope_ratios(d: int, s: float) -> list[float]:
    """A made-up list of the shape that the search finds: from 1 for the fastest channel to s for the slowest."""
    return [1 + (s - 1) * i / (d // 2 - 1) for i in range(d // 2)]


NEW_BASE = 2_000_000.0
BETAS = (32.0, 1.0)
FORMULAE: dict[str, tuple[str, Callable[[int, float, int, float], Vector]]] = {
    "pi": ("pi", lambda d, b, n, s: pi(d, b, s)),
    "ntk": ("ntk", lambda d, b, n, s: ntk(d, b, s)),
    "abf": ("abf", lambda d, b, n, s: abf(d, NEW_BASE)),
    "llama3": ("llama3", lambda d, b, n, s: llama3(d, b, s, n, 1, 4)),
    "longrope": ("longrope", lambda d, b, n, s: longrope(d, b, longrope_ratios(d, s))),
    **{
        f"{name}-{kind}": (name, formula)
        for name in ("ntk_by_parts", "yarn")
        for kind, formula in (
            ("truncated", lambda d, b, n, s: by_parts(d, b, s, ramp_over_index(d, b, n, *BETAS, True))),
            ("untruncated", lambda d, b, n, s: by_parts(d, b, s, ramp_over_index(d, b, n, *BETAS, False))),
            ("rotations", lambda d, b, n, s: by_parts(d, b, s, ramp_over_rotations(d, b, n, *BETAS))),
        )
    },
}
"""Case -> its method, and its frequencies for (d, b, N, s)."""


def options(case: str, d: int, s: float) -> dict[str, object]:
    """The options under which the package must give the frequencies of `FORMULAE[case]`."""
    known: dict[str, dict[str, object]] = {
        "abf": {"rope_theta": NEW_BASE},
        "longrope": {"long_factor": longrope_ratios(d, s)},
        "truncated": {"truncate": True},
        "untruncated": {"truncate": False},
        "rotations": {"ramp": "rotations"},
    }
    return known.get(case.split("-")[-1], {})
