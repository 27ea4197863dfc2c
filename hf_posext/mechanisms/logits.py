"""The softmax scaling of attention modules, for a temperature that must reach the whole logit."""

from __future__ import annotations

from torch import nn

from hf_posext.compat import rope_block
from hf_posext.contract import Site
from hf_posext.errors import PatchError
from hf_posext.mechanisms._scope import scoped_modules

SCALING = "scaling"
UNDO = "_posext_scaling"


def attention_modules(model: nn.Module, sites: list[Site]) -> list[nn.Module]:
    """Attention modules that the sites serve: those of the text part with a softmax scaling and a layer index."""
    labels = {site.label for site in sites}
    found = []
    for scoped in scoped_modules(model):
        module = scoped.module
        if scoped.is_text and isinstance(getattr(module, SCALING, None), float) and hasattr(module, "layer_idx"):
            kinds = getattr(scoped.config, "layer_types", None) or []
            index = module.layer_idx  # None in encoders that keep no cache
            kind = kinds[index] if index is not None and index < len(kinds) else ""  # type: ignore[index, operator]
            if "" in labels or kind in labels:
                found.append(module)
    return found


def scales_logits_itself(site: Site) -> bool:
    """Whether the model puts a temperature (`mscale_all_dim`) into its softmax scaling, or would have to.

    Multi-head latent attention rotates a small part of each head, so cos and sin cannot carry the temperature.
    """
    block = rope_block(site.config, site.label) or {}
    return bool(block.get("mscale_all_dim")) or hasattr(site.config, "qk_rope_head_dim")


def write(model: nn.Module, sites: list[Site], scale: float) -> None:
    """Multiplies the present softmax scaling of the attention modules that the sites serve.

    Raises:
        PatchError: the model has no such modules, so a temperature cannot reach its logits.
    """
    modules = attention_modules(model, sites)
    if not modules:
        raise PatchError(
            f"The attention modules of {type(model).__name__} have no softmax `scaling` of their own, so "
            'temperature="logits" cannot act. Use the default temperature="cos_sin".'
        )
    for module in modules:
        module.__dict__.setdefault(UNDO, getattr(module, SCALING))
        setattr(module, SCALING, getattr(module, SCALING) * scale)


def restore(model: nn.Module) -> None:
    """Gives every module back the softmax scaling that it had."""
    for module in model.modules():
        if UNDO in module.__dict__:
            setattr(module, SCALING, module.__dict__.pop(UNDO))
