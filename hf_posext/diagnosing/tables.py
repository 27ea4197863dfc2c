"""What is added to hidden states: rows enough, rows that differ, and rows that are loud enough; and collisions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hf_posext import mechanisms
from hf_posext.contract import Site
from hf_posext.diagnosing.finding import NOTE, OK, WRONG, Finding, NotApplicableError
from hf_posext.diagnosing.frequencies import cosines
from hf_posext.diagnosing.subject import Subject
from hf_posext.errors import quoted
from hf_posext.lengths import stated_length
from hf_posext.mechanisms import rotary

FAINT = 0.01  # of the norm of a token's embedding: below the rounding of 16 bits
FEW = 0.1  # of all positions


def rows(subject: Subject) -> Finding:
    """Whether tables that are looked up by position have a row for each position that the config allows.

    A table is known by what a text takes from it: one row after the other, whatever its words.

    Raises:
        NotApplicableError: no such table, or the model cannot run on token ids alone.
    """
    counts = looked_up(subject)
    if not counts:
        raise NotApplicableError("No table of the model is looked up by position.")
    stated = stated_length(subject.root.config)
    measured = {"rows": counts, "stated_length": stated}
    short = [name for name, count in counts.items() if count < stated]
    if short:
        return Finding(
            "rows",
            WRONG,
            measured,
            f"{quoted(short)} has {min(counts[name] for name in short)} rows, and the config says {stated} positions.",
            "Load the weights that belong to this config, or lower its length to the rows that there are.",
        )
    return Finding("rows", OK, measured, "Every position that the config allows has a row.")


class LookUps(TorchFunctionMode):
    """Notes the tables that a forward takes one row after the other from, whatever module does it.

    Attributes:
        tables: those, by the address of their first element, with their rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.embedding and is_run(args[0]):
            self.tables[args[1].data_ptr()] = len(args[1])
        return func(*args, **(kwargs or {}))


def looked_up(subject: Subject) -> dict[str, int]:
    """Path of each table that a text takes one row after the other from, or that is known for one -> its rows."""
    known = [site for site in subject.sites if mechanisms.has_rows(site)]
    with LookUps() as seen:
        subject.run(subject.text())
    names = {value.data_ptr(): name.rpartition(".")[0] for name, value in subject.root.named_parameters()}
    found = {names[address]: rows for address, rows in seen.tables.items() if address in names}
    return {**{str(site): len(getattr(site.module, site.field)) for site in known}, **found}


def is_run(ids: Tensor) -> bool:
    """Whether whole numbers follow one another."""
    steps = ids.reshape(-1).diff() if not ids.is_floating_point() else ids.new_zeros(1)
    return len(steps) > 3 and bool((steps == 1).all())


def magnitudes(subject: Subject) -> Finding:
    """How loud rows of positions are beside embeddings of tokens, and whether they differ at all.

    Raises:
        NotApplicableError: no table is added, or it has no values.
    """
    token = token_norm(subject)
    sizes = {str(site): norms(site) for site in subject.tables}
    measured = {"token_norm": token, "tables": sizes}
    silent = [name for name, size in sizes.items() if size["spread"] <= 1e-6 * max(token, size["norm"])]
    faint = [name for name, size in sizes.items() if size["spread"] < FAINT * token]
    if silent:
        return Finding(
            "magnitudes",
            WRONG,
            measured,
            f"All rows of {quoted(silent)} are the same, so that they say nothing about positions.",
            "Load the table from the checkpoint: it was not in the file, or something has written over it.",
        )
    if faint or any(size["zero_rows"] for size in sizes.values()):
        return Finding(
            "magnitudes",
            NOTE,
            measured,
            "Rows are zero, or differ by less than 1 % of a token's embedding.",
            "Check that the table was trained over its whole length.",
        )
    return Finding("magnitudes", OK, measured, "Rows of positions differ, and can be heard beside the tokens.")


def token_norm(subject: Subject) -> float:
    """Mean norm of the embeddings of tokens, 0 where the model has none that can be read."""
    embedding = subject.root.get_input_embeddings()
    weight = getattr(embedding, "weight", None)
    if weight is None or weight.is_meta:
        raise NotApplicableError("The model has no table of tokens to compare with.")
    return float(weight.detach().float().norm(dim=1).mean())


def norms(site: Site) -> dict[str, float]:
    """Mean norm of rows, mean norm of what they differ from their mean by, and how many are zero."""
    table = mechanisms.read_table(site, mechanisms.count_positions(site)).rows
    return {
        "norm": float(table.norm(dim=1).mean()),
        "spread": float((table - table.mean(dim=0)).norm(dim=1).mean()),
        "zero_rows": int((table.norm(dim=1) == 0).sum()),
    }


def collisions(subject: Subject) -> Finding:
    """Whether neighbouring positions are still told apart at T.

    Raises:
        NotApplicableError: nothing in which neighbours could collide can be looked at, or N is not known.
    """
    target = subject.target
    shares = {str(site): share for site in subject.sites if (share := collided(subject, site, target)) is not None}
    if not shares or target < 2:
        raise NotApplicableError("No encoding in which neighbouring positions could collide can be looked at.")
    measured = {"share": shares, "target_length": target}
    worst = max(shares.values())
    if worst > FEW:
        names = [name for name, share in shares.items() if share > FEW]
        return Finding(
            "collisions",
            WRONG,
            measured,
            f"Neighbouring positions near {target} are the same for {quoted(names)}: angles, distances or rows have "
            "too few bits.",
            "Keep positions and angles in float32 (load with `dtype=`, do not cast positions), or read shorter text.",
        )
    if worst:
        return Finding(
            "collisions",
            NOTE,
            measured,
            f"{worst:.1%} of all positions have the row of their neighbour, as rows past the last old one do.",
            'Give `align="corners"` to `pi` for rows that all differ.',
        )
    return Finding("collisions", OK, measured, f"Neighbouring positions differ up to {target} tokens.")


def collided(subject: Subject, site: Site, target: int) -> float | None:
    """Share of looked-at neighbours that are the same; None for a site that cannot be looked at."""
    if mechanisms.is_off(site) or getattr(getattr(site.module, site.field, None), "is_meta", False):
        return None
    if mechanisms.has_rows(site):
        table = mechanisms.read_table(site, mechanisms.count_positions(site)).rows
        return float((table[1:] == table[:-1]).all(dim=1).double().mean())
    if site.mechanism == rotary.MECHANISM:
        found = cosines(site, [target - 2, target - 1], subject.root.dtype)
        return None if found is None else float(torch.equal(found[..., 0, :], found[..., 1, :]))
    if site.mechanism == "alibi":
        bits = torch.finfo(bias_dtype(subject, site)).eps
        return float(target - 1 > 2 ** (1 - int(math.log2(bits))))
    return None


def bias_dtype(subject: Subject, site: Site) -> torch.dtype:
    """The dtype of the bias that a module of attention is handed."""
    seen: list[torch.dtype] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.extend([kwargs[site.field].dtype] if torch.is_tensor(kwargs.get(site.field)) else [])

    handle = site.module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        subject.run(subject.text())
    finally:
        handle.remove()
    return seen[0] if seen else torch.float32
