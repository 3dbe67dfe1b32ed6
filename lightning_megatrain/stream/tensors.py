"""Tensors among a call's arguments and results. Read at each call of each unit, so the usual containers are walked without pytree's registry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_iter


def tensors_in(*trees: Any) -> Iterator[Tensor]:
    """All tensors, in the order in which pytree flattens."""
    for tree in trees:
        if isinstance(tree, Tensor):
            yield tree
        elif type(tree) in (tuple, list):
            yield from tensors_in(*tree)
        elif type(tree) is dict:
            yield from tensors_in(*tree.values())
        elif not (tree is None or isinstance(tree, int | float | str)):
            yield from (leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor))


def first_tensor(*trees: Any) -> Tensor | None:
    """The first tensor among a call's arguments: a block's hidden states."""
    return next(tensors_in(*trees), None)


def input_versions(args: Any, kwargs: Any) -> tuple[int, ...]:
    """Version counters of all tensors among a call's arguments."""
    return tuple(t._version for t in tensors_in(args, kwargs) if not t.is_inference())
