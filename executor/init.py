"""Initial weights: an element is a function of seed, parameter name and its index in the whole parameter, no more.

Every rank makes only the box that it holds, and every strategy and home starts from the same bits. Element i of a
matrix is normal: Box-Muller on two 64-bit hashes of the counter i (splitmix64), keyed by seed and name. The standard
deviation is 0.02, and 0.02 / sqrt(2 num_layers) for the two projections that add to the residual stream (GPT-2). Norms
start at 1, biases at 0.
"""

import hashlib
import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from executor.backbone import shape_of
from plans.layout import Box
from plans.model import ModelSpec, Parameter

STD = 0.02
_RESIDUAL = ("o_proj.weight", "down_proj.weight")
_CHUNK = 1 << 20  # elements at a time: the hashes of a whole matrix would take several times its memory

Hashes = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]


def initial_weight(
    model: ModelSpec, parameter: Parameter, layer: int, box: Box, seed: int, dtype: torch.dtype
) -> Tensor:
    """The initial values of one box of one parameter."""
    shape = shape_of(box, vector=parameter.vector)
    if parameter.vector:
        return torch.zeros(shape, dtype=dtype) if parameter.name.endswith(".bias") else torch.ones(shape, dtype=dtype)
    std = STD / math.sqrt(2 * model.num_layers) if parameter.name.endswith(_RESIDUAL) else STD
    weight = torch.empty(shape, dtype=dtype)
    key = _key(seed, parameter.full_name(layer))
    rows = max(1, _CHUNK // box.cols)
    for row in range(box.row0, box.row1, rows):
        part = Box(row, min(row + rows, box.row1), box.col0, box.col1)
        values = std * _normal(key, _indices(part, parameter.cols))
        weight[row - box.row0 : part.row1 - box.row0] = torch.from_numpy(values)
    return weight


def _key(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def _indices(box: Box, cols: int) -> Hashes:
    """Index of every element of a box in the whole parameter, row by row."""
    rows = np.arange(box.row0, box.row1, dtype=np.uint64)[:, None] * np.uint64(cols)
    return rows + np.arange(box.col0, box.col1, dtype=np.uint64)[None, :]


def _normal(key: int, index: Hashes) -> Floats:
    first, second = _splitmix64(key, 2 * index), _splitmix64(key, 2 * index + 1)
    radius = np.sqrt(-2.0 * np.log(1.0 - _unit(first)))  # 1 - u is in (0, 1]
    normal: Floats = radius * np.cos(2.0 * np.pi * _unit(second))
    return normal


def _unit(hashes: Hashes) -> Floats:
    """The upper 53 bits as a number in [0, 1)."""
    return (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix64(key: int, counter: Hashes) -> Hashes:
    """Outputs of splitmix64 (Steele, Lea, Flood 2014) seeded with `key`, by number; wraps at 2^64."""
    z = (counter + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
