"""A batch in slices: while a unit is on the device, all rows go through it, a few at a time, so that a large batch crosses the bus once.

What is sliced: every tensor of two or more dimensions whose first is as long as that of the call's first tensor. What comes out is put together again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lightning_megatrain.stream.tensors import first_tensor

Call = tuple[Any, Any]
"""Positional and keyword arguments."""


def split_rows(args: Any, kwargs: Any, rows: int | None) -> list[Call]:
    """The call as several of at most `rows` rows each; one where all fit, or `rows` is None."""
    first = first_tensor(args, kwargs)
    if rows is None or first is None or first.ndim < 2 or first.shape[0] <= rows:
        return [(args, kwargs)]
    batch = first.shape[0]

    def part(begin: int) -> Call:
        def slice_(leaf: Any) -> Any:
            return leaf[begin : begin + rows] if isinstance(leaf, Tensor) and leaf.ndim >= 2 and leaf.shape[0] == batch else leaf

        sliced: Call = tree_map(slice_, (args, kwargs))
        return sliced

    return [part(begin) for begin in range(0, batch, rows)]


def join_rows(outputs: Sequence[Any], calls: Sequence[Call], name: str) -> Any:
    """What the slices of one call returned, as if it had been one.

    Raises ValueError where an output is not by rows (a sum over the batch).
    """
    if len(outputs) == 1:
        return outputs[0]
    flat = [tree_flatten(output) for output in outputs]
    lengths = [first.shape[0] for call in calls if (first := first_tensor(*call)) is not None]
    joined: list[Any] = []
    for leaves in zip(*(leaves for leaves, _ in flat), strict=True):
        if not isinstance(leaves[0], Tensor):
            joined.append(leaves[0])
        elif all(leaf.ndim >= 1 and leaf.shape[0] == length for leaf, length in zip(leaves, lengths, strict=True)):
            joined.append(torch.cat(leaves))
        else:
            raise ValueError(
                f"offload.rows_per_pass: {name} returned a tensor of shape {tuple(leaves[0].shape)} for {lengths[0]} rows, expected its first dimension to be "
                "the rows; this model can't work through a batch in slices: set offload.rows_per_pass='all'"
            )
    return tree_unflatten(joined, flat[0][1])
