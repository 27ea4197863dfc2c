"""How a text is served: with a cache as without, with padding on the left as without."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_posext import mechanisms
from hf_posext.diagnosing.finding import NOTE, OK, WRONG, Finding, NotApplicableError
from hf_posext.diagnosing.subject import Subject, apart, first_of
from hf_posext.evaluation.forwards import CACHES
from hf_posext.mechanisms.rotary import LENGTH_DEPENDENT, rope_type

MOST = 64  # tokens of the text that is read with a cache: what is beyond N shows where N is small
STEPS = 4  # tokens read one by one
PADDING = 3


def cache(subject: Subject) -> Finding:
    """Whether a prompt and single tokens with a cache give what one pass gives.

    Raises:
        NotApplicableError: the model keeps no cache.
    """
    ids = subject.text(min(MOST, subject.short_length))
    whole = subject.read(ids)[:, -STEPS:]
    change = apart(whole, cached(subject, ids))
    measured = {"difference": change, "tokens": ids.shape[1]}
    if change > 10 * subject.noise:
        return Finding(
            "cache",
            WRONG,
            measured,
            "Decoding with a cache gives something else than one pass over the same text.",
            "Look for a forward that numbers new tokens from 0, or pass `position_ids` to it; until then generate "
            "with `use_cache=False`.",
        )
    kinds = {rope_type(site) for site in subject.sites if site.mechanism == "rotary"} & set(LENGTH_DEPENDENT)
    if kinds:
        return Finding(
            "cache",
            NOTE,
            measured,
            f"The checkpoint's own type `{sorted(kinds)[0]}` turns all keys anew as text grows past "
            f"{subject.short_length} tokens, and keys in a cache stay as they were.",
            "Patch with `dynamic=True`, which turns cached keys as they are read, or generate with `use_cache=False`.",
        )
    return Finding("cache", OK, measured, "Decoding with a cache gives what one pass gives.")


def cached(subject: Subject, ids: Tensor) -> Tensor:
    """[1, `STEPS`, V], the answers to the last tokens, read one by one after all others.

    Raises:
        NotApplicableError: the model keeps no cache.
    """
    cache = next((name for name in CACHES if name in subject.accepted), None)
    if cache is None:
        raise NotApplicableError("The model keeps no cache of keys.")
    is_pair = "decoder_input_ids" in subject.accepted
    name = "decoder_input_ids" if is_pair else "input_ids"

    def step(tokens: Tensor, past: Any) -> Any:
        output = subject.run(ids if is_pair else tokens, **{name: tokens, cache: past, "use_cache": True})
        if getattr(output, cache, None) is None:
            raise NotApplicableError("The model keeps no cache of keys.")
        return output

    output = step(ids[:, :-STEPS], None)
    rows = []
    for token in ids[0, -STEPS:]:
        output = step(token.reshape(1, 1), getattr(output, cache))
        rows.append(first_of(output)[:, -1:])
    return torch.cat(rows, dim=1)


def padding(subject: Subject) -> Finding:
    """Whether a row that is padded on the left is read as alone.

    Raises:
        NotApplicableError: the model takes no mask, or is too short for padding.
    """
    if "attention_mask" not in subject.accepted:
        raise NotApplicableError("The model takes no `attention_mask`.")
    length = min(8, subject.short_length - PADDING)
    if length < 2:
        raise NotApplicableError("The model reads too few tokens for padding.")
    ids = subject.text(length)
    alone, (by_itself, by_ids) = subject.read(ids), padded(subject, ids)
    measured: dict[str, Any] = {"difference": apart(alone, by_itself)}
    if by_ids is not None:
        measured["difference_with_position_ids"] = apart(alone, by_ids)
    return padding_finding(measured, 10 * subject.noise, any(map(mechanisms.has_rows, subject.sites)))


def padded(subject: Subject, ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """[1, L, V] twice, what the model says to a text behind padding: by itself, and with `position_ids` from the mask.

    The second is None where it takes none.
    """
    token = getattr(subject.root.config.get_text_config(decoder=True), "pad_token_id", None)
    front = torch.full((1, PADDING), 0 if token is None else int(token), device=ids.device)
    mask = torch.cat((torch.zeros_like(front), torch.ones_like(ids)), dim=1)
    text = torch.cat((front, ids), dim=1)
    by_itself = subject.read(text, attention_mask=mask)[:, PADDING:]
    if "position_ids" not in subject.accepted:
        return by_itself, None
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    return by_itself, subject.read(text, attention_mask=mask, position_ids=places)[:, PADDING:]


def padding_finding(measured: dict[str, Any], most: float, has_table: bool) -> Finding:
    """What the differences mean.

    Args:
        measured: `difference` by itself, and the other one with `position_ids` where the model takes them.
        most: what rounding may make of them.
        has_table: whether rows are added for positions, which padding moves in models that number slots. Distances
            between tokens are the same behind padding.
    """
    by_ids = measured.get("difference_with_position_ids")
    if measured["difference"] <= most:
        return Finding("padding", OK, measured, "A row that is padded on the left is read as alone.")
    if has_table and by_ids is None:
        meaning = "Padding on the left moves positions: the model numbers slots, and takes no `position_ids`."
        return Finding("padding", NOTE, measured, meaning, "Pad on the right.")
    if has_table and by_ids is not None and by_ids <= most:
        return Finding(
            "padding",
            NOTE,
            measured,
            "Padding on the left moves positions unless the model is given `position_ids`.",
            "Give `position_ids = (mask.cumsum(-1) - 1).clamp(min=0)`, as `generate` does, or pad on the right.",
        )
    return Finding(
        "padding",
        WRONG,
        measured,
        "A row that is padded on the left is not read as alone.",
        "Pad on the right or not at all; look for a mask that is dropped, or positions that are made from the width "
        "of the tensor.",
    )
