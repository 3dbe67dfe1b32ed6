"""`WeightGuard`: whoever reads a weight whose update still waits, waits for it.

While a unit's update is deferred its parameters are of the class `PendingParameter`, whose one difference is torch's own hook for every operation on a tensor
(`__torch_function__`): the first that could see the values asks for the update, and the parameter is an ordinary one again. Operations that see no value
(shape, dtype, gradient) don't ask. What it can't see: memory that was shared before (a view, an array), read past torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

_waiting: dict[int, Callable[[], None]] = {}
"""Of each pending parameter, by id: what brings it up to date."""

_ATTRIBUTES = (
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad", "grad_fn", "grad_dtype", "is_leaf", "is_sparse", "is_meta", "is_cpu", "is_cuda",
    "itemsize", "nbytes", "retains_grad", "_version", "_backward_hooks", "_post_accumulate_grad_hooks",
)  # fmt: skip
_METHODS = (
    "size",
    "numel",
    "nelement",
    "dim",
    "stride",
    "storage_offset",
    "element_size",
    "is_contiguous",
    "is_floating_point",
    "is_complex",
    "__hash__",
    "get_device",
)
_SEE_NO_VALUE = {
    *(
        getattr(attribute, how)
        for attribute in map(partial(getattr, Tensor), _ATTRIBUTES)
        for how in ("__get__", "__set__", "__delete__")
        if hasattr(attribute, how)
    ),
    *(getattr(Tensor, name) for name in _METHODS),
}


class PendingParameter(nn.Parameter):
    """A parameter whose update waits."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        if func not in _SEE_NO_VALUE:
            for leaf in tree_iter((args, kwargs)):
                if type(leaf) is cls:
                    _waiting[id(leaf)]()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class WeightGuard:
    """Makes parameters pending, and ordinary again.

    Args:
        parameters: those of a unit, by its index.
        update: brings a unit up to date.
    """

    def __init__(self, parameters: Callable[[int], list[nn.Parameter]], update: Callable[[int], None]) -> None:
        self._parameters = parameters
        self._update = update

    def close(self, unit: int) -> None:
        """The unit's weights wait for an update from now on."""

        def bring() -> None:
            self._update(unit)

        for parameter in self._parameters(unit):
            if type(parameter) is nn.Parameter:
                _waiting[id(parameter)] = bring
                parameter.__class__ = PendingParameter

    def open(self, unit: int) -> None:
        """The unit is up to date. Idempotent."""
        for parameter in self._parameters(unit):
            if type(parameter) is PendingParameter:
                parameter.__class__ = nn.Parameter  # type: ignore[assignment]
                del _waiting[id(parameter)]
