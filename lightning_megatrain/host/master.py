"""The exact fp32 master as two 16-bit planes: a bf16 plane (what the device computes with) and a trail (what bf16 leaves off).

The bf16 plane is the master rounded to the nearest bf16, ties away from zero: `high = (bits + 0x8000) >> 16`, `trail = bits - (high << 16)`.
The trail then always fits an int16 (with ties to even a tie rounded down would leave +0x8000). A NaN stays NaN in both planes.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 20  # elements at a time: the temporaries stay small whatever the tensor's size


def split_(master: Tensor, high: Tensor, trail: Tensor) -> None:
    """Write fp32 `master` into `high` (bf16) and `trail` (int16); three contiguous CPU tensors of one number of elements."""
    bits, upper, lower = master.reshape(-1).view(torch.int32), high.view(-1).view(torch.int16), trail.view(-1)
    for at in range(0, bits.numel(), _CHUNK):
        part = bits[at : at + _CHUNK]
        rounded = (part + 0x8000) >> 16  # wraps for the NaN of all ones only, replaced below
        nan = (part & 0x7FFFFFFF) > 0x7F800000
        rounded = torch.where(nan, (part >> 16) | 0x40, rounded)
        upper[at : at + _CHUNK] = rounded.to(torch.int16)
        lower[at : at + _CHUNK] = torch.where(nan, 0, part - (rounded << 16)).to(torch.int16)


def combine_(high: Tensor, trail: Tensor, master: Tensor) -> None:
    """Write the exact fp32 values of the planes into `master`; the inverse of `split_`."""
    upper, lower, bits = high.view(-1).view(torch.int16), trail.view(-1), master.view(-1).view(torch.int32)
    for at in range(0, bits.numel(), _CHUNK):
        part = slice(at, at + _CHUNK)
        torch.add(upper[part].to(torch.int32) << 16, lower[part], out=bits[part])


def combine(high: Tensor, trail: Tensor) -> Tensor:
    """A new fp32 tensor of `high`'s shape with the planes' exact values."""
    master = torch.empty(high.shape, dtype=torch.float32)
    combine_(high, trail, master)
    return master
