"""torch's attention kernel for CPUs, called directly: it takes float32 masks beside states in half precision.

It also gives the logarithm of the sum of weights, [B, H, L] float32, with which parts of attention can be joined, and
which its backward wants in the layout that it was returned in.
"""

from __future__ import annotations

import torch
from torch import Tensor

attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernel computes these, and may be called at all: plans for it are made on the host, not traced."""
    is_alike = query.dtype == key.dtype == value.dtype and query.shape[-1] == value.shape[-1]
    return is_alike and query.device.type == "cpu" and not torch.compiler.is_compiling()
