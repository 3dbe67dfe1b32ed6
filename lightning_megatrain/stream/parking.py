"""Saved inputs of blocks in host memory between forward and backward (`activations="host"`).

A block that recomputes keeps only its input. `Parking` copies it to page-locked host memory on the stream of what leaves the device, lets the device memory go,
and brings it back one block ahead of its backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map

from lightning_megatrain.host.buffer import HostBuffer
from lightning_megatrain.stream.engines import Engine, Event
from lightning_megatrain.stream.tensors import first_tensor


class Parked:
    """One tensor that waits on the host; the memory goes back to the parking with the last reference to this."""

    def __init__(self, tensor: Tensor, buffer: HostBuffer, load: Callable[[Parked], None]) -> None:
        self.buffer = buffer
        self.shape, self.dtype, self.device, self.requires_grad = tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad
        self.nbytes = tensor.numel() * tensor.element_size()
        self._version, self._of = tensor._version, weakref.ref(tensor)
        self._held: Tensor | None = tensor
        self._changed = False
        self._load = load
        self.back: Tensor | None = None
        self.arrived: Event | None = None

    @property
    def changed(self) -> bool:
        """Whether somebody wrote to the tensor after it was parked."""
        tensor = self._of()
        return self._changed or (tensor is not None and tensor._version != self._version)

    def let_go(self) -> None:
        """The next block has been called: a write while the copy was under way would have been seen by now."""
        self._changed, self._held = self.changed, None

    def take(self) -> Tensor:
        """The tensor on the device; a new one each time."""
        self._load(self)
        back, self.back = self.back, None
        assert back is not None
        return back.requires_grad_(self.requires_grad)


class Parking:
    """Host memory of all parked tensors, and the order in which they are needed again: the last one first.

    Args:
        engine: primitives of the device.
        pin: page-lock the memory.
    """

    def __init__(self, engine: Engine, *, pin: bool) -> None:
        self._engine = engine
        self._pin = pin
        self._free: dict[int, list[HostBuffer]] = {}
        self._all: list[HostBuffer] = []
        self._order: list[weakref.ref[Parked]] = []
        self.parked_bytes = 0

    @property
    def nbytes(self) -> int:
        """Host bytes allocated so far."""
        return sum(buffer.nbytes for buffer in self._all)

    def begin(self) -> None:
        """A pass begins."""
        self._order.clear()

    def park(self, args: Any, kwargs: Any) -> Any:
        """The arguments with their first tensor, and every other that needs a gradient, replaced by `Parked`."""
        first = first_tensor(args, kwargs)

        def replace(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel() and (leaf is first or leaf.requires_grad):
                return self._park(leaf)
            return leaf

        return tree_map(replace, (args, kwargs))

    def _park(self, tensor: Tensor) -> Parked:
        nbytes = tensor.numel() * tensor.element_size()
        free = self._free.setdefault(nbytes, [])
        if free:
            buffer = free.pop()
        else:
            buffer = HostBuffer(nbytes, pin=self._pin)
            self._all.append(buffer)
        parked = Parked(tensor, buffer, self._bring)
        weakref.finalize(parked, free.append, buffer)
        source = tensor.detach().contiguous().view(-1).view(torch.uint8)
        # the tensor must be complete before it leaves; compute may write to its memory again only after that, which the engine sees to
        self._engine.to_host.wait(self._engine.compute.record())
        self._engine.to_host.copy(buffer.tensor(0, torch.uint8, (nbytes,)), source)
        self._left = self._engine.to_host.record()
        before = self._order[-1]() if self._order else None
        if before is not None:
            before.let_go()
        self._order.append(weakref.ref(parked))
        self.parked_bytes += nbytes
        return parked

    def _bring(self, parked: Parked) -> None:
        self._start(parked)
        at = next((i for i, ref in enumerate(self._order) if ref() is parked), 0)
        if at:
            before = self._order[at - 1]()
            if before is not None:
                self._start(before)
        assert parked.arrived is not None
        self._engine.compute.wait(parked.arrived)

    def _start(self, parked: Parked) -> None:
        if parked.back is not None:
            return
        back = torch.empty(parked.shape, dtype=parked.dtype, device=parked.device)
        # it left before it comes back, and what used its new memory before is over
        self._engine.to_device.wait(self._left)
        self._engine.to_device.wait(self._engine.compute.record())
        self._engine.to_device.copy(back.view(-1).view(torch.uint8), parked.buffer.tensor(0, torch.uint8, (parked.nbytes,)))
        parked.arrived, parked.back = self._engine.to_device.record(), back

    def close(self) -> None:
        """Unlock the memory. Idempotent."""
        for buffer in self._all:
            buffer.close()


def bring_back(tree: Any) -> Any:
    """A tree of arguments with every `Parked` brought to the device."""
    return tree_map(lambda leaf: leaf.take() if isinstance(leaf, Parked) else leaf, tree)


def changed(tree: Any) -> bool:
    """Whether a parked tensor was written to since."""
    return any(isinstance(leaf, Parked) and leaf.changed for leaf in tree_iter(tree))
