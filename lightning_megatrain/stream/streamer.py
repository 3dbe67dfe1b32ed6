"""`LayerStreamer`: moves units to the device in time.

Owns the slot pool and the traces. The order of units is recorded in each pass; the next pass of the same kind prefetches by it. An order that changes
is still right: a unit that was not foreseen is copied when asked for.
Knows units and copies; knows nothing of modules, autograd or Lightning.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Protocol

import torch
from torch import Tensor

from lightning_megatrain.host.store import HostStore, HostUnit
from lightning_megatrain.stream.engines import Engine
from lightning_megatrain.stream.record import Lane, Recorder
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
        self._places: dict[int, list[int]] = {}
        self._recording: list[int] = []
        self._position = 0

    def restart(self) -> None:
        """Begin a pass: what the last one recorded is the expectation."""
        if self._recording and self._recording != self.order:
            self.order = self._recording
            self._places = {}
            for at, unit in enumerate(self.order):
                self._places.setdefault(unit, []).append(at)
        self._recording = []
        self._position = 0

    @property
    def expected(self) -> list[int]:
        """The order of the pass that is recorded or, before it is, of the one before."""
        return self._recording or self.order

    def note(self, unit: int) -> None:
        """A unit was needed."""
        self._recording.append(unit)
        at = self._next(unit)
        if at is not None:
            self._position = at + 1

    def _next(self, unit: int) -> int | None:
        places = self._places.get(unit, ())
        found = bisect_left(places, self._position)
        return places[found] if found < len(places) else None

    def distance(self, unit: int) -> int | None:
        """Uses of other units before the next one of this; None if this pass needs it no more."""
        at = self._next(unit)
        return None if at is None else at - self._position

    def distance_around(self, unit: int) -> int | None:
        """As `distance`, counted on into the next pass, which is expected to be like this one."""
        here = self.distance(unit)
        if here is not None or unit not in self._places:
            return here
        return len(self.order) - self._position + self._places[unit][0]

    def ahead(self, depth: int) -> list[int]:
        """The next `depth` different units that are expected."""
        found: list[int] = []
        for at in range(self._position, len(self.order)):
            if len(found) >= depth:
                break
            if self.order[at] not in found:
                found.append(self.order[at])
        return found


class LayerStreamer:
    """Acquire and release units; copies run ahead along the trace.

    Args:
        engine: primitives of the device.
        store: the host's weights.
        depth: how many units are copied ahead.
        resident: bytes of device memory that keep units from one use to the next, beyond what `depth` asks for.
        recorder: notes when copies were made.

    A slot is taken from the unit whose next use is farthest (Belady's rule, on the trace of the last pass): so the last units of the forward pass are still
    there when backward begins, and what nobody changes (frozen weights, all weights while gradients are accumulated) may stay from pass to pass.
    """

    def __init__(self, engine: Engine, store: HostStore, depth: int, resident: int = 0, recorder: Recorder | None = None) -> None:
        self.engine = engine
        self._recorder = recorder or Recorder()
        self._store = store
        self._depth = depth
        self.pool = SlotPool(engine, [] if engine.in_place else store.units, depth, resident)
        self._seen: dict[int, Tensor] = {}
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
        """Start a pass (`"train"`, `"eval"`): weights on the device are forgotten, since anybody may have written the host's.

        With resident memory, those stay whose version and a sample of whose values are what they were.
        """
        self._trace = self._traces.setdefault(kind, StepTrace())
        self._trace.restart()
        for slot in list(self._on_device.values()):
            slot.leases = 0
            if not (self.pool.resident and self._unwritten(slot)):
                self._forget(slot)

    def _unwritten(self, slot: DeviceSlot) -> bool:
        assert slot.unit is not None
        host = self._store.units[slot.unit]
        if not self.updates.ready(slot.unit) or slot.stamp != _stamp(host):
            return False
        before, now = self._seen.get(slot.unit), host.sampled()
        self._seen[slot.unit] = now
        return before is not None and torch.equal(before, now)

    def acquire(self, unit: int) -> DeviceSlot:
        """A slot that holds the unit; compute given from now on may read it. Pair with `release`."""
        self.engine.check()
        host = self._store.units[unit]
        self._trace.note(unit)
        slot = self._on_device.get(unit)
        if slot is not None and slot.leases == 0 and (not self.updates.ready(unit) or slot.stamp != _stamp(host)):
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
            assert slot.unit is not None
            if self._next_use(slot.unit) is None:
                self._forget(slot)

    def _next_use(self, unit: int) -> int | None:
        return self._trace.distance_around(unit) if self.pool.resident else self._trace.distance(unit)

    def _load(self, host: HostUnit, *, must: bool) -> DeviceSlot | None:
        if must:
            # the update's write must be visible to the copy
            self.updates.ensure(host.unit.index)
        elif not self.updates.ready(host.unit.index):
            return None
        slot = self.pool.take(host.unit.index, self._next_use, must=must)
        if slot is None:
            return None
        if slot.unit is not None:
            self._forget(slot)
        if slot.idle is not None:
            # the compute that read the slot's last unit must be over before the copy writes
            self.engine.to_device.wait(slot.idle)
        slot.unit, slot.stamp = host.unit.index, _stamp(host)
        began = self.engine.to_device.mark() if self._recorder.on else None
        self.engine.to_device.copy(slot.memory[: host.nbytes], self._sources[host.unit.index])
        if began is not None:
            self._recorder.add(Lane.TO_DEVICE, host.unit.index, began, self.engine.to_device.mark(), nbytes=host.nbytes)
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
