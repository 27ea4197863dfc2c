"""One file per method. Importing this package registers all built-in ones, and only this list names them."""

from hf_posext.methods import abf, dynamic_ntk, llama3, longrope, ntk, ntk_by_parts, pi, yarn
from hf_posext.methods.registry import REGISTRY, Method, get_method, method

__all__ = [
    "REGISTRY",
    "Method",
    "abf",
    "dynamic_ntk",
    "get_method",
    "llama3",
    "longrope",
    "method",
    "ntk",
    "ntk_by_parts",
    "pi",
    "yarn",
]
