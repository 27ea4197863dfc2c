"""What is said against what is there: the record of a patch, the config, and the tokenizer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hf_posext import mechanisms
from hf_posext.contract import Site
from hf_posext.diagnosing.finding import NOTE, OK, WRONG, Finding, NotApplicableError
from hf_posext.diagnosing.frequencies import frequencies_of, rebuilt
from hf_posext.diagnosing.subject import Subject
from hf_posext.errors import quoted
from hf_posext.mechanisms import rotary
from hf_posext.native import RELATIVE_TOLERANCE
from hf_posext.writing import STATE

UNLIMITED = 10**9  # tokenizers without a limit give a number beyond all lengths


def patch(subject: Subject) -> Finding:
    """Whether the patch that is recorded acts in the modules.

    Raises:
        NotApplicableError: there is none.
    """
    record = subject.record
    if record is None:
        raise NotApplicableError("The model is not patched.")
    replaced = [name for name in record.sites if not is_held(subject, name)] if is_live(subject) else []
    measured = {"method": record.method, "factor": record.factor, "in_force": subject.in_force, "not_held": replaced}
    if not subject.in_force:
        return Finding(
            "patch",
            WRONG,
            measured,
            f"The config records a patch, {record.describe()}, and nothing in the modules acts on it.",
            "Load the checkpoint with `hf_posext.load_pretrained`, or unpatch and patch again.",
        )
    if replaced:
        return Finding(
            "patch",
            WRONG,
            measured,
            f"Modules that the patch changed were replaced or restored since: {quoted(replaced)}.",
            "Call `unpatch_model` and patch again after all other changes to the model.",
        )
    return Finding("patch", OK, measured, f"The patch acts: {record.describe()}.")


def is_live(subject: Subject) -> bool:
    """Whether the model was patched, or its patch taken over, in this process, and the patch changes modules."""
    record = subject.record
    return STATE in vars(subject.root) and record is not None and record.native != "unchanged"


def is_held(subject: Subject, name: str) -> bool:
    """Whether a site of the patch is there and changed."""
    return any(str(site) == name and mechanisms.is_changed(site) for site in subject.sites)


def config(subject: Subject) -> Finding:
    """Whether rotary modules hold what their class makes of the config as it is now.

    Raises:
        NotApplicableError: there are none, or the patch has no words in the config.
    """
    sites, record = subject.with_frequencies, subject.record
    if record is not None and (record.native == "weights" or (record.native is None and is_live(subject))):
        raise NotApplicableError("The frequencies are those of a patch that the config has no words for.")
    different = {}
    for site in sites:
        found = disagreement(subject, site)
        if found is not None:
            different[str(site)] = found
    if different:
        return Finding(
            "config",
            WRONG,
            {"different": different},
            f"The config says something else than {quoted(different)}: it was edited after the module was made, "
            "which reads it only then.",
            "Reload the model with the edited config, or call `patch_model` in place of editing.",
        )
    return Finding("config", OK, {"different": {}}, "The rotary modules hold what the config says.")


def disagreement(subject: Subject, site: Site) -> dict[str, Any] | None:
    """In what a module differs from what its class makes of the model's config; None for rounding or less."""
    fresh = replace(site, module=rebuilt(site))
    live, stated = frequencies_of(site), frequencies_of(fresh)
    kinds = rotary.rope_type(site), rotary.rope_type(fresh)
    name = rotary.scaling_name(site.label)
    scalings = float(getattr(site.module, name)), float(getattr(fresh.module, name))
    is_same_kind = kinds[0] == kinds[1] or mechanisms.is_changed(site)  # a patched module is always "default"
    factor = subject.record.factor if subject.record else 1.0
    exact = RELATIVE_TOLERANCE * max(1, factor / 8)
    bits = torch.finfo(getattr(site.module, site.field).dtype).eps
    tolerance = max(exact, 2.0**-7 if is_rounded(live, stated) else bits)
    is_alike = live.shape == stated.shape and torch.allclose(live, stated, rtol=tolerance, atol=1e-12)
    if is_alike and is_same_kind and abs(scalings[0] - scalings[1]) <= 1e-5:
        return None
    return {
        "rope_type": list(kinds),
        "attention_scaling": list(scalings),
        "largest_ratio": largest_ratio(live, stated),
    }


def is_rounded(live: torch.Tensor, stated: torch.Tensor) -> bool:
    """Whether frequencies are others rounded to 16 bits, which is for `angles` to say."""
    if live.shape != stated.shape:
        return False
    return any(torch.equal(live, stated.to(kind).double()) for kind in (torch.bfloat16, torch.float16))


def largest_ratio(live: torch.Tensor, stated: torch.Tensor) -> float | None:
    """By what factor frequencies differ at most; None where there are not as many, or some are 0."""
    if live.shape != stated.shape or not bool(live.all() and stated.all()):
        return None
    ratios = live / stated
    return float(torch.maximum(ratios, 1 / ratios).max())


def tokenizer(subject: Subject) -> Finding:
    """Whether the tokenizer lets through what the model can read.

    Raises:
        NotApplicableError: no tokenizer, or none that has a limit.
    """
    limit = getattr(subject.tokenizer, "model_max_length", None)
    if limit is None:
        raise NotApplicableError("No tokenizer with a `model_max_length` was given.")
    measured = {"model_max_length": int(min(limit, UNLIMITED)), "usable_length": subject.target}
    if limit < subject.target:
        return Finding(
            "tokenizer",
            WRONG,
            measured,
            f"The tokenizer cuts at {limit} tokens where it truncates, and the model reads {subject.target}.",
            f"Set `tokenizer.model_max_length = {subject.target}`, or give `tokenizer=` to `patch_model`.",
        )
    if UNLIMITED > limit > subject.target:
        return Finding(
            "tokenizer",
            NOTE,
            measured,
            f"The tokenizer lets {limit} tokens through, and the model was made for {subject.target}.",
            "Cut texts at the model's length, or patch it for longer ones.",
        )
    return Finding("tokenizer", OK, measured, "The tokenizer cuts nothing that the model can read.")
