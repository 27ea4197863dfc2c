"""The tiny models of the tests are what the tests take them for: small, and sensitive to position."""

import pytest
import torch

from tests.architectures import ARCHITECTURES, Architecture, tiny_inputs, tiny_model


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.id)
@torch.no_grad()
def test_row_is_sensitive_to_position(row: Architecture) -> None:
    model, inputs = tiny_model(row.id), tiny_inputs()
    logits = model(**inputs).logits
    if row.takes_position_ids:
        positions = torch.arange(16)[None].expand(2, -1)
        torch.testing.assert_close(model(**inputs, position_ids=positions).logits, logits)
        moved = model(**inputs, position_ids=2 * positions).logits
    else:
        moved = model(input_ids=inputs["input_ids"].flip(1)).logits.flip(1)
    assert (moved - logits).abs().max() > 0.02 * logits.std()
