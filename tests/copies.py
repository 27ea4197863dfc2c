"""Copies of whole models, as users make them."""

import io
import pickle
from typing import Any

import torch


def through_pickle(model: Any) -> Any:
    """A copy by way of `pickle`."""
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model: Any) -> Any:
    """A copy by way of `torch.save` of the whole model."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
