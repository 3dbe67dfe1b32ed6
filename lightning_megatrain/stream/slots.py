"""`DeviceSlot`, a unit's place on the device, and `SlotPool`, all places.

Owns the device memory of streamed weights. Slots come in a few sizes (blocks, embedding, head), each as large as its largest unit, so a large
embedding doesn't blow up the slots of the blocks. Nothing is allocated in the steady state: a pool grows only when more units are held at once
than `prefetch_depth` foresees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_megatrain.host.store import HostUnit
from lightning_megatrain.stream.engines import Engine, Event


class DeviceSlot:
    """Device memory for one unit at a time.

    Attributes:
        memory: (size,) uint8, on the device; a storage of its own.
        unit: index of the unit that it holds or is being filled with, or None.
        loaded: reached when the copy of that unit is complete.
        idle: reached when the last compute that read the unit is over.
        leases: how many calls hold it now.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.unit: int | None = None
        self.stamp: tuple[int, ...] = ()
        self.loaded: Event | None = None
        self.idle: Event | None = None
        self.leases = 0
        self._views: dict[int, list[Tensor]] = {}

    def views(self, host: HostUnit) -> list[Tensor]:
        """The unit's weights in this slot, one view a parameter; the same tensors at each call."""
        found = self._views.get(host.unit.index)
        if found is None:
            found = []
            for place in host.parameters:
                part = self.memory[place.byte_offset : place.byte_offset + place.count * place.dtype.itemsize]
                found.append(part.view(place.dtype).view(place.weight.shape))
            self._views[host.unit.index] = found
        return found

    def at(self, dtype: torch.dtype, offset: int, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
        """A tensor over this slot's memory; `offset` in elements of `dtype`."""
        return torch.empty(0, dtype=dtype, device=self.memory.device).set_(self.memory.untyped_storage(), offset, tuple(shape), tuple(strides))

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor, a transpose or a slice lies in this slot."""
        return tensor.untyped_storage().data_ptr() == self.memory.untyped_storage().data_ptr()


class SlotPool:
    """Slots by size class.

    Args:
        engine: allocates the memory.
        units: all units; those that do not stream get no slot.
        depth: how many units are copied ahead.
        resident: bytes that may be taken beyond the `depth + 2` slots of each size.
    """

    def __init__(self, engine: Engine, units: Sequence[HostUnit], depth: int, resident: int = 0) -> None:
        self._engine = engine
        self.resident = resident
        self._extra = 0  # bytes taken of `resident`
        self._class_of: dict[int, int] = {}
        members: dict[int, int] = {}
        for host in sorted((h for h in units if h.unit.streamed and h.nbytes), key=lambda h: -h.nbytes):
            size = next((s for s in members if s * 3 // 4 <= host.nbytes <= s), host.nbytes)
            members[size] = members.get(size, 0) + 1
            self._class_of[host.unit.index] = size
        self._members = members
        self._capacity = {size: min(count, depth + 2) for size, count in members.items()}
        self._slots: dict[int, list[DeviceSlot]] = {size: [] for size in members}

    @property
    def nbytes(self) -> int:
        """Device bytes allocated so far."""
        return sum(size * len(slots) for size, slots in self._slots.items())

    def take(self, unit: int, next_use: Callable[[int], int | None], *, must: bool) -> DeviceSlot | None:
        """A slot for a unit, whose `idle` the copy has to wait for: an empty one, a new one, or the one of the unit that is needed last.

        Args:
            unit: to be copied into it.
            next_use: how far off a unit's next use is, None for never.
            must: take a slot also from a unit that is needed sooner, and if all are held let the pool grow; without, None.
        """
        size = self._class_of[unit]
        slots = self._slots[size]
        free = [slot for slot in slots if slot.leases == 0]
        for slot in free:
            if slot.unit is None:
                return slot
        if len(slots) < self._capacity[size]:
            return self._grow(size)
        if len(slots) < self._members[size] and self._extra + size <= self.resident:
            self._extra += size
            return self._grow(size)
        if free:
            uses = [math.inf if (use := next_use(slot.unit)) is None else use for slot in free if slot.unit is not None]
            last = max(range(len(free)), key=uses.__getitem__)
            own = next_use(unit)
            if must or (own is not None and uses[last] > own):
                return free[last]
        return self._grow(size) if must else None

    def _grow(self, size: int) -> DeviceSlot:
        with torch.inference_mode(False):  # an inference tensor could not be used in training later
            slot = DeviceSlot(self._engine.allocate(size))
        self._slots[size].append(slot)
        return slot

    def __iter__(self):  # type: ignore[no-untyped-def]
        for slots in self._slots.values():
            yield from slots
