"""Relative bias: a longer learned table, and a bias on the logits that is learned for each head and distance."""

from __future__ import annotations

from dataclasses import fields

from hf_posext.arguments import check_choice
from hf_posext.contract import BucketedBias, PositionTable, TableChange
from hf_posext.methods.hierarchical import hierarchical
from hf_posext.methods.registry import method
from hf_posext.methods.tile import tile

TABLES = {each.name: each for each in (tile, hierarchical)}

relative_bias = method(
    "relative_bias",
    summary="a longer learned table, and a trainable bias per head and distance; text up to N is unchanged until tuned",
    paper="Raffel et al. 2019 (T5), arXiv 1910.10683, sec. 2.1",
)


@relative_bias.on("learned")
def learned(
    reading: PositionTable,
    factor: float,
    *,
    buckets: int = 32,
    max_distance: int = 128,
    table: str = "tile",
    frozen_rows: bool = False,
) -> BucketedBias:
    """A bias b[h, bucket(j - i)] on the logit of query i and key j, and the rows that another method gives.

    The bias is a parameter `posext_bias` of each attention module, [buckets, H], zero at first, which training changes
    and which is saved with the weights. Text of at most N tokens is read as before while it is zero.

    Args:
        reading: the old rows, [N, W].
        factor: s; not used, the table says how long it is to be.
        buckets: of distances; in bidirectional attention an even number, half of it for keys behind the query.
        max_distance: in tokens, from which on all distances share a bucket.
        table: the method that gives the new rows, "tile" or "hierarchical".
        frozen_rows: keep the first N rows exact and untrained, so that training changes the new rows only.

    Raises:
        ValueError: another table; sizes from which no buckets follow are found when the model's attention is known.

    Source: Raffel et al. 2019 (T5, arXiv 1910.10683), sec. 2.1.
    """
    longer: TableChange = TABLES[check_choice("table", table, TABLES)].change(
        "learned", reading, factor, factor, {"frozen_rows": frozen_rows}
    )
    rows = {each.name: getattr(longer, each.name) for each in fields(longer)}
    return BucketedBias(**rows, buckets=buckets, max_distance=max_distance)
