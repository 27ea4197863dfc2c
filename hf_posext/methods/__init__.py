"""One file per method. Importing this package registers all built-in ones, and only this list names them."""

from hf_posext.methods import (
    abf,
    alibi,
    dynamic_ntk,
    llama3,
    longrope,
    nope,
    ntk,
    ntk_by_parts,
    pi,
    rerope,
    self_extend,
    window,
    yarn,
)
from hf_posext.methods.registry import REGISTRY, Method, get_method, method

__all__ = [
    "REGISTRY",
    "Method",
    "abf",
    "alibi",
    "dynamic_ntk",
    "get_method",
    "llama3",
    "longrope",
    "method",
    "nope",
    "ntk",
    "ntk_by_parts",
    "pi",
    "rerope",
    "self_extend",
    "window",
    "yarn",
]
