"""Numbers in words."""

from __future__ import annotations

from typing import Any


def verdict(difference: dict[str, Any]) -> str:
    """A paired difference of NLL in words, with its numbers."""
    value, low, high = difference["difference"], difference["low"], difference["high"]
    if low is None:
        return f"{'better' if value < 0 else 'worse'} by {abs(value):.3f} nats per token, on one document only"
    word = "clearly better" if high < 0 else "clearly worse" if low > 0 else "not clearly different"
    return f"{word} ({value:+z.3f} nats per token, 95 % {low:+z.3f} to {high:+z.3f})"
