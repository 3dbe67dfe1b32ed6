"""`LayerStreamer`: moves units to the device in time.

Owns the slot pool and the traces. The order of units is recorded in each pass; the next pass of the same kind prefetches by it. An order that changes
is still right: a unit that was not foreseen is copied when asked for.
Knows units and copies; knows nothing of modules, autograd or Lightning.
"""

from __future__ import annotations

from typing import Protocol

import torch

from lightning_megatrain.host.store import HostStore, HostUnit
from lightning_megatrain.stream.engines import Engine
from lightning_megatrain.stream.slots import DeviceSlot, SlotPool


class Updates(Protocol):
    """Updates of host weights that may still be under way."""

    def ready(self, unit: int) -> bool:
        """Whether a unit's weights are up to date."""

    def ensure(self, unit: int) -> None:
        """Wait until they are."""


class _UpToDate:
    def ready(self, unit: int) -> bool:
        return True

    def ensure(self, unit: int) -> None:
        return


class StepTrace:
    """The order in which units were needed in one pass, and where the present pass stands in it."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self._recording: list[int] = []
        self._position = 0

    def restart(self) -> None:
        """Begin a pass: what the last one recorded is the expectation."""
        if self._recording:
            self.order = self._recording
        self._recording = []
        self._position = 0

    @property
    def expected(self) -> list[int]:
        """The order of the pass that is recorded or, before it is, of the one before."""
        return self._recording or self.order

    def note(self, unit: int) -> None:
        """A unit was needed."""
        self._recording.append(unit)
        for at in range(self._position, len(self.order)):
            if self.order[at] == unit:
                self._position = at + 1
                return

    def ahead(self, depth: int) -> list[int]:
        """The next `depth` different units that are expected."""
        found: list[int] = []
        for unit in self.order[self._position :]:
            if len(found) >= depth:
                break
            if unit not in found:
                found.append(unit)
        return found


class LayerStreamer:
    """Acquire and release units; copies run ahead along the trace.

    Args:
        engine: primitives of the device.
        store: the host's weights.
        depth: how many units are copied ahead.
    """

    def __init__(self, engine: Engine, store: HostStore, depth: int) -> None:
        self.engine = engine
        self._store = store
        self._depth = depth
        self.pool = SlotPool(engine, [] if engine.in_place else store.units, depth)
        self._traces: dict[str, StepTrace] = {}
        self._trace = StepTrace()
        self._on_device: dict[int, DeviceSlot] = {}
        self._sources = {h.unit.index: h.weights.tensor(0, torch.uint8, (h.nbytes,)) for h in store.units if not engine.in_place and h.unit.streamed}
        self.copied_bytes = 0
        self.updates: Updates = _UpToDate()

    @property
    def expected(self) -> list[int]:
        """The order in which the next training pass is expected to need units."""
        trace = self._traces.get("train")
        return trace.expected if trace is not None else []

    def begin(self, kind: str) -> None:
        """Start a pass (`"train"`, `"eval"`): weights on the device are forgotten, since anybody may have written the host's."""
        self._trace = self._traces.setdefault(kind, StepTrace())
        self._trace.restart()
        for slot in list(self._on_device.values()):
            slot.leases = 0
            self._forget(slot)

    def acquire(self, unit: int) -> DeviceSlot:
        """A slot that holds the unit; compute given from now on may read it. Pair with `release`."""
        self.engine.check()
        host = self._store.units[unit]
        self._trace.note(unit)
        slot = self._on_device.get(unit)
        if slot is not None and slot.leases == 0 and slot.stamp != _stamp(host):
            self._forget(slot)
            slot = None
        if slot is None:
            slot = self._load(host, must=True)
        assert slot is not None
        assert slot.loaded is not None
        slot.leases += 1
        # the copy's write must be visible to the compute that reads the slot
        self.engine.compute.wait(slot.loaded)
        for ahead in self._trace.ahead(self._depth):
            if ahead not in self._on_device and self._load(self._store.units[ahead], must=False) is None:
                break
        return slot

    def release(self, slot: DeviceSlot) -> None:
        """End of one use of a slot."""
        if slot.leases == 0:  # a pass that began meanwhile has forgotten it
            return
        slot.leases -= 1
        if slot.leases == 0:
            slot.idle = self.engine.compute.record()
            if slot.unit not in self._trace.ahead(self._depth + 1):
                self._forget(slot)

    def _load(self, host: HostUnit, *, must: bool) -> DeviceSlot | None:
        if must:
            # the update's write must be visible to the copy
            self.updates.ensure(host.unit.index)
        elif not self.updates.ready(host.unit.index):
            return None
        soon = self._trace.ahead(self._depth + 1)
        slot = self.pool.take(host.unit.index, soon, must=must)
        if slot is None:
            return None
        if slot.unit is not None:
            self._forget(slot)
        if slot.idle is not None:
            # the compute that read the slot's last unit must be over before the copy writes
            self.engine.to_device.wait(slot.idle)
        slot.unit, slot.stamp = host.unit.index, _stamp(host)
        self.engine.to_device.copy(slot.memory[: host.nbytes], self._sources[host.unit.index])
        slot.loaded = self.engine.to_device.record()
        self._on_device[host.unit.index] = slot
        self.copied_bytes += host.nbytes
        return slot

    def _forget(self, slot: DeviceSlot) -> None:
        if slot.unit is not None:
            del self._on_device[slot.unit]
        slot.unit = None
        if slot.idle is not None:
            self.engine.to_device.wait(slot.idle)
        self.engine.to_device.poison(slot.memory)


def _stamp(host: HostUnit) -> tuple[int, ...]:
    """Changes whenever a unit's host weights do."""
    return (host.updates, *(place.parameter._version for place in host.parameters))
