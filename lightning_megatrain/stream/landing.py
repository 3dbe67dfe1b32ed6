"""Where weight gradients go when a unit's backward is over.

`GradientLander` takes all gradients of a unit at once (from `Bind.backward`). With an engine that copies, they are gathered in a `GradientSlab` on the
device, cross to the host on their own stream, and the parameter's `.grad` becomes a view of host memory; in place, autograd accumulates them as ever.
Either way autograd's accumulation node of the parameter runs, once a backward and after every other contribution (a penalty on weights, the other
use of a tied weight): its hooks tell when a gradient is final, which is the moment an overlapped update may use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node

from lightning_megatrain.host.buffer import HostBuffer, Lane
from lightning_megatrain.host.store import HostParameter, HostStore, HostUnit
from lightning_megatrain.stream.engines import Engine, Event
from lightning_megatrain.stream.record import Lane as RecordLane
from lightning_megatrain.stream.record import Recorder

UnitReady = Callable[[HostUnit, "list[tuple[HostParameter, Tensor]]", "Event | None"], None]
"""Called with a unit, its final gradients on the host, and the event after which they are there (None: they are)."""


class GradientSlab:
    """Device memory in which one unit's gradients lie side by side for the way to the host."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.free: Event | None = None


class _UnitGradients:
    """Host memory of one unit's gradients, and what is known about them in this step."""

    def __init__(self) -> None:
        self.buffer: HostBuffer | None = None
        self.landed: Event | None = None
        self.expected: set[int] = set()
        self.crossed: set[int] = set()  # parameters whose first gradient of this backward crossed asynchronously
        self.norms: dict[int, tuple[int, int, Tensor]] = {}  # of each parameter: address and version of the gradient that was measured, and its norm


class GradientLander:
    """Brings gradients to the host and says when a unit's are final.

    Args:
        engine: primitives of the device.
        store: where parameters live.
        recorder: notes when copies were made.
        pin: page-lock the host's gradient memory.
    """

    def __init__(self, engine: Engine, store: HostStore, recorder: Recorder, *, pin: bool) -> None:
        self._engine = engine
        self._recorder = recorder
        self._store = store
        self._pin = pin
        self._nodes: dict[int, Node] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._slabs: list[GradientSlab] = []
        self._next_slab = 0
        self._gradients = {host.unit.index: _UnitGradients() for host in store.units}
        self._spare: list[HostBuffer] = []
        self.on_ready: UnitReady | None = None
        """Set for steps that update a unit as soon as its gradients are final; None: gradients stay in `.grad`."""

        self._measures = False

    def begin(self, on_ready: UnitReady | None, *, measure: bool) -> None:
        """A pass begins.

        Args:
            on_ready: see the attribute.
            measure: take the norm of each gradient when it leaves the device: it is in the caches then, and on a GPU it costs no host memory traffic.
        """
        self.on_ready, self._measures = on_ready, measure
        for own in self._gradients.values():
            own.norms.clear()

    def norm(self, parameter: Tensor) -> Tensor:
        """L2 norm of a parameter's gradient, () on the CPU in the gradient's dtype."""
        assert parameter.grad is not None
        if self._store.find(parameter) is not None:
            known = self._gradients[self._store.unit_of(parameter).unit.index].norms.get(id(parameter))
            if known is not None and known[:2] == (parameter.grad.data_ptr(), parameter.grad._version):
                return known[2].to("cpu")
        norm: Tensor = torch.linalg.vector_norm(parameter.grad)
        return norm

    @property
    def slab_bytes(self) -> int:
        """Device bytes of the slabs."""
        return sum(slab.memory.numel() for slab in self._slabs)

    def land(
        self, host: HostUnit, places: Sequence[HostParameter], gradients: Sequence[Tensor | None], nodes: Sequence[Node | None], *, on_host: bool = False
    ) -> list[Tensor | None]:
        """Take a unit's gradients in its backward; what is returned goes on to autograd's accumulation.

        Args:
            host: the unit.
            places: its parameters.
            gradients: one each, on the device; None where there is none.
            nodes: autograd's accumulation node of each, None where it needs no gradient.
            on_host: the gradients are in host memory already.
        """
        own = self._gradients[host.unit.index]
        passed: list[Tensor | None] = [None] * len(places)
        crossing: dict[int, tuple[HostParameter, Tensor]] = {}
        for i, (place, gradient, node) in enumerate(zip(places, gradients, nodes, strict=True)):
            if gradient is None or node is None:
                continue
            try:
                if not torch._C._will_engine_execute_node(node):  # type: ignore[attr-defined]
                    continue  # a gradient with respect to something else was asked for
            except RuntimeError:  # torch.autograd.grad with respect to this parameter: it wants the value itself
                passed[i] = gradient.to("cpu")
                continue
            self._watch(place, node)
            own.expected.add(id(place.parameter))
            if (on_host and self.on_ready is not None) or gradient.layout != torch.strided:
                self.wait(host)
                passed[i] = gradient.to("cpu")  # it is used up within this backward; or it is sparse
            elif id(place.parameter) in own.crossed and place.parameter.grad is not None:
                # the site was called more than once: added in the order in which autograd would add
                self.wait(host)
                place.parameter.grad.add_(gradient.to("cpu", place.parameter.grad.dtype))
            elif place.parameter.grad is not None or _has_hooks(place.parameter):
                self.wait(host)
                passed[i] = gradient.to("cpu")
            else:
                key = id(place)
                crossing[key] = (place, gradient if key not in crossing else crossing[key][1] + gradient)  # one weight under two names of a block
        if crossing:
            if on_host:
                self._keep(host, self._gradients[host.unit.index], list(crossing.values()))
            else:
                self._cross(host, list(crossing.values()))
        return passed

    def _cross(self, host: HostUnit, crossing: list[tuple[HostParameter, Tensor]]) -> None:
        own = self._gradients[host.unit.index]
        dtype = _gradient_dtype(crossing[0][0])
        same = [(place, gradient) for place, gradient in crossing if _gradient_dtype(place) == dtype]
        first = min(place.element_offset for place, _ in same) * dtype.itemsize
        last = max(place.element_offset + place.count for place, _ in same) * dtype.itemsize
        slab = self._slab(host)
        if slab.free is not None:
            # the copy that read the slab's last content must be over before compute writes the next
            self._engine.compute.wait(slab.free)
        norms: dict[int, Tensor] = {}
        for place, gradient in same:
            at = place.element_offset * dtype.itemsize
            leaving = slab.memory[at : at + place.count * dtype.itemsize].view(dtype).copy_(gradient.reshape(-1))
            if self._measures:
                norms[id(place)] = torch.linalg.vector_norm(leaving)
        # the gradients must be in the slab before the copy reads them
        self._engine.to_host.wait(self._engine.compute.record())
        buffer = self._host_buffer(host, own)
        began = self._engine.to_host.mark() if self._recorder.on else None
        self._engine.to_host.copy(buffer.tensor(first, torch.uint8, (last - first,)), slab.memory[first:last])
        if began is not None:
            self._recorder.add(RecordLane.TO_HOST, host.unit.index, began, self._engine.to_host.mark(), backward=True, nbytes=last - first)
        slab.free = own.landed = self._engine.to_host.record()
        for place, _ in same:
            own.crossed.add(id(place.parameter))
            grad = place.parameter.grad = buffer.tensor(place.element_offset * dtype.itemsize, dtype, place.weight.shape)
            if id(place) in norms:
                own.norms[id(place.parameter)] = (grad.data_ptr(), grad._version, norms[id(place)])
        if len(same) < len(crossing):  # several dtypes in one unit: one more crossing each
            self.wait(host)
            for place, gradient in crossing:
                if _gradient_dtype(place) != dtype:
                    place.parameter.grad = gradient.to("cpu", _gradient_dtype(place))

    def _keep(self, host: HostUnit, own: _UnitGradients, crossing: list[tuple[HostParameter, Tensor]]) -> None:
        """Stored gradients lie in memory of our own: in the C library's heap, freed and taken again each step among activations, they tear holes into it."""
        itemsize = max(_gradient_dtype(place).itemsize for place, _ in crossing)
        buffer = self._host_buffer(host, own)
        for place, gradient in crossing:
            view = buffer.tensor(place.element_offset * itemsize, _gradient_dtype(place), place.weight.shape)
            own.crossed.add(id(place.parameter))
            place.parameter.grad = view.copy_(gradient)
            if self._measures:
                own.norms[id(place.parameter)] = (view.data_ptr(), view._version, torch.linalg.vector_norm(view))

    def _slab(self, host: HostUnit) -> GradientSlab:
        if not self._slabs:
            itemsize = max(4, *(place.dtype.itemsize for h in self._store.units for place in h.parameters))
            largest = max(h.elements for h in self._store.units if h.unit.streamed) * itemsize
            self._slabs = [GradientSlab(self._engine.allocate(largest)) for _ in range(2)]
        self._next_slab = (self._next_slab + 1) % len(self._slabs)
        return self._slabs[self._next_slab]

    def _host_buffer(self, host: HostUnit, own: _UnitGradients) -> HostBuffer:
        """Memory that nobody else still reads: a gradient that the user kept stays what it was."""
        if own.buffer is not None and not own.buffer.referenced:
            return own.buffer
        nbytes = host.elements * max(_gradient_dtype(place).itemsize for place in host.parameters)
        for i, spare in enumerate(self._spare):
            if spare.nbytes >= nbytes and not spare.referenced:
                own.buffer = self._spare.pop(i)
                return own.buffer
        own.buffer = HostBuffer(nbytes, lane=Lane.GRADIENTS, pin=self._pin)
        return own.buffer

    def _watch(self, place: HostParameter, node: Node) -> None:
        """Follow a parameter's accumulation node (it is another one after the parameter changed its dtype)."""
        key = id(place.parameter)
        if self._nodes.get(key) is node:
            return
        host = self._store.unit_of(place.parameter)

        def before(gradients: tuple[Tensor, ...]) -> None:
            if gradients and gradients[0] is not None:
                # autograd will add to `.grad` now: the copy that fills it must be over
                self.wait(host)

        def after(*_: object) -> None:
            self._final(host, key)

        self._nodes[key] = node
        self._handles += [node.register_prehook(before), node.register_hook(after)]

    def _final(self, host: HostUnit, key: int) -> None:
        own = self._gradients[host.unit.index]
        own.expected.discard(key)
        if own.expected or self.on_ready is None:
            return
        ready = [(place, place.parameter.grad) for place in host.parameters if place.parameter.grad is not None]
        for place, _ in ready:
            place.parameter.grad = None
        landed, own.landed = own.landed, None
        own.crossed.clear()
        if own.buffer is not None:
            self._spare.append(own.buffer)
            own.buffer = None
        if ready:
            self.on_ready(host, ready, landed)

    def wait(self, host: HostUnit) -> None:
        """Block until a unit's gradients are on the host."""
        own = self._gradients[host.unit.index]
        if own.landed is not None:
            own.landed.wait()
            own.landed = None

    def wait_all(self) -> None:
        """Block until every gradient given so far is on the host; note how many bytes they take."""
        for host in self._store.units:
            self.wait(host)
            self._gradients[host.unit.index].expected.clear()
            self._gradients[host.unit.index].crossed.clear()
        held = sum(p.grad.numel() * p.grad.element_size() for h in self._store.units for p in h.unit.parameters if p.grad is not None)
        self._store.gradient_bytes = max(self._store.gradient_bytes, held)

    def close(self) -> None:
        """Remove all hooks. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes, self.on_ready = [], {}, None


def _has_hooks(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def _gradient_dtype(place: HostParameter) -> torch.dtype:
    return place.parameter.grad_dtype or place.dtype
