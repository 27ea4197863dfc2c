"""Position encodings as pure functions of tensors, for people who build their own models.

Nothing here knows a model, keeps a state or changes what it is given, and gradients reach tables and states. Letters:
P positions, L tokens, W channels of a row, N rows of a table, D channels of a head, F frequencies, H heads. Positions
and distances are in tokens, angles in radians. What has to be exact is computed in float64 on the CPU and only then
moved, for some devices have no float64.
"""

from hf_posext.functional.biases import alibi_slopes, relative_buckets
from hf_posext.functional.rotary import apply_rotary, rotary_angles
from hf_posext.functional.sinusoids import sinusoidal_table
from hf_posext.functional.tables import hierarchical_table, interpolate_table, tile_table

__all__ = [
    "alibi_slopes",
    "apply_rotary",
    "hierarchical_table",
    "interpolate_table",
    "relative_buckets",
    "rotary_angles",
    "sinusoidal_table",
    "tile_table",
]
