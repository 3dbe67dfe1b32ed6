"""Binding of weights: one site's forward with its units on the device.

`Bind` is the one autograd function: host parameters in, views of the slots out; its backward gets all of a site's weight gradients at once.
`SiteForward` replaces a site's `forward` for the length of a run. A site that recomputes goes through torch's own checkpoint, whose function acquires
and binds by itself; otherwise a saved-tensors hook turns each saved view of a slot into a handle, so that nothing keeps the slot, and backward acquires
the unit again.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint

from lightning_megatrain.host.store import HostStore
from lightning_megatrain.stream.landing import GradientLander
from lightning_megatrain.stream.slots import DeviceSlot
from lightning_megatrain.stream.streamer import LayerStreamer
from lightning_megatrain.units import Site

SECOND_DERIVATIVE = "second derivatives (create_graph=True) are not supported through streamed units; train this module with strategy='auto'"


@dataclass(eq=False)
class StreamContext:
    """What every site of a run shares."""

    streamer: LayerStreamer
    lander: GradientLander
    store: HostStore
    recompute_sites: set[int]
    """Ids of the submodules that run forward again in backward."""
    open_calls: list[SiteCall]

    @property
    def in_place(self) -> bool:
        return self.streamer.engine.in_place

    def finish_backward(self) -> None:
        """At the end of every backward pass: nothing stays on the device for it, and all gradients are on the host."""
        for call in self.open_calls:
            call.leave_backward()
        self.open_calls.clear()
        self.lander.wait_all()

    def in_backward(self, call: SiteCall) -> None:
        """A call takes part in the running backward pass."""
        if not self.open_calls:
            torch.autograd.Variable._execution_engine.queue_callback(self.finish_backward)  # type: ignore[attr-defined]
        self.open_calls.append(call)


class Bind(torch.autograd.Function):
    """Host parameters to device views. `call` says which."""

    @staticmethod
    def forward(ctx: Any, call: SiteCall, views: Sequence[Tensor], *parameters: nn.Parameter) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        out = tuple(view.detach() for view in views)
        ctx.mark_non_differentiable(*(o for o, p in zip(out, parameters, strict=True) if not p.requires_grad))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(SECOND_DERIVATIVE)
        return (None, None, *ctx.call.land(gradients, [node for node, _ in ctx.next_functions]))


class _Handle:
    """A saved tensor that lay in a slot: where to find it when the unit is back."""

    __slots__ = ("dtype", "index", "offset", "shape", "strides")

    def __init__(self, index: int, tensor: Tensor) -> None:
        self.index, self.dtype, self.offset = index, tensor.dtype, int(tensor.storage_offset())
        self.shape, self.strides = tuple(tensor.shape), tuple(tensor.stride())


class SiteCall:
    """One call of a site, from its forward to the end of its backward."""

    def __init__(self, context: StreamContext, site: Site) -> None:
        self.context = context
        self.site = site
        self._ran = False
        self._forward_slots: list[DeviceSlot] = []
        self._held: list[DeviceSlot] = []

    # forward

    def acquire(self) -> list[DeviceSlot]:
        """The site's units on the device; nothing where the device uses them in place."""
        if self.context.in_place:
            for unit in self.site.units:
                self.context.streamer.updates.ensure(unit)
            return []
        return [self.context.streamer.acquire(unit) for unit in self.site.units]

    def release(self, slots: list[DeviceSlot]) -> None:
        for slot in slots:
            self.context.streamer.release(slot)

    def views(self, slots: list[DeviceSlot]) -> list[Tensor]:
        """The site's weights on the device, in the order of its slots' parameters."""
        if self.context.in_place:
            return [self.context.store.units[unit].parameters[position].weight for _, _, unit, position in self.site.slots]
        by_unit = dict(zip(self.site.units, slots, strict=True))
        return [by_unit[unit].views(self.context.store.units[unit])[position] for _, _, unit, position in self.site.slots]

    def bind(self, slots: list[DeviceSlot]) -> tuple[Tensor, ...]:
        parameters = [self.context.store.units[unit].parameters[position].parameter for _, _, unit, position in self.site.slots]
        return Bind.apply(self, self.views(slots), *parameters)  # type: ignore[no-any-return,no-untyped-call]

    @contextmanager
    def swapped(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """The site's submodules see these tensors as their parameters."""
        owners = [(owner, attribute, owner._parameters[attribute]) for owner, attribute, _, _ in self.site.slots]
        try:
            for (owner, attribute, _), tensor in zip(owners, tensors, strict=True):
                owner._parameters[attribute] = tensor  # type: ignore[assignment]
            yield
        finally:
            for owner, attribute, parameter in owners:
                owner._parameters[attribute] = parameter

    def keep(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Forward that keeps what autograd saves, weights excepted."""
        slots = self.acquire()
        try:
            views = self.bind(slots)
            with self.swapped(views):
                if self.context.in_place:
                    return original(*args, **kwargs)
                self._forward_slots = slots
                with saved_tensors_hooks(self._pack, self._unpack):
                    return original(*args, **kwargs)
        finally:
            self._forward_slots = []
            self.release(slots)

    def run(self, original: Callable[..., Any], versions: tuple[int, ...], dtype: torch.dtype, buffers: BufferReplay, args: Any, kwargs: Any) -> Any:
        """The checkpointed function: the first pass lets its slots go, the second leaves them to backward."""
        again, self._ran = self._ran, True
        if again and versions != input_versions(args, kwargs):
            raise RuntimeError(
                f"an input of {self.site.name} ({type(self.site.module).__name__}) was changed by an in-place operation after its forward, "
                "and is needed again in backward; clone it first, or set offload.recompute='none'"
            )
        slots = self.acquire()
        previous = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            if again:
                self._enter_backward(slots)
            with self.swapped(self.bind(slots)), buffers.pass_(again):
                return original(*args, **kwargs)
        finally:
            torch.set_default_dtype(previous)
            if not again:
                self.release(slots)

    # backward

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.layout == torch.strided:
            for index, slot in enumerate(self._forward_slots):
                if slot.owns(tensor):
                    return _Handle(index, tensor)
        return tensor, tensor._version

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _Handle):
            tensor, version = packed
            if tensor._version != version:
                raise RuntimeError(
                    f"a tensor that {self.site.name} ({type(self.site.module).__name__}) needs for its backward was changed by an in-place operation: "
                    f"it is at version {tensor._version}, expected {version}"
                )
            return tensor  # type: ignore[no-any-return]
        if torch.is_grad_enabled():
            raise RuntimeError(SECOND_DERIVATIVE)
        if not self._held:
            self._enter_backward(self.acquire())
        return self._held[packed.index].at(packed.dtype, packed.offset, packed.shape, packed.strides)

    def _enter_backward(self, slots: list[DeviceSlot]) -> None:
        self.context.in_backward(self)
        self._held = slots

    def leave_backward(self) -> None:
        """Let the slots go that backward holds. Idempotent."""
        held, self._held = self._held, []
        self.release(held)

    def land(self, gradients: Sequence[Tensor | None], nodes: Sequence[Node | None]) -> list[Tensor | None]:
        """All weight gradients of this call; returns what goes on to autograd, one a parameter."""
        self.context.in_backward(self)
        out: list[Tensor | None] = [None] * len(gradients)
        for unit in self.site.units:
            host = self.context.store.units[unit]
            at = [i for i, (_, _, u, _) in enumerate(self.site.slots) if u == unit]
            places = [host.parameters[self.site.slots[i][3]] for i in at]
            landed = self.context.lander.land(host, places, [gradients[i] for i in at], [nodes[i] for i in at])
            for i, gradient in zip(at, landed, strict=True):
                out[i] = gradient
        self.leave_backward()
        return out

    def watch(self, inputs: Any, outputs: Any) -> None:
        """Refuse second derivatives, and let slots go when the inputs' gradients are there, also where no weight gets one."""
        for tensor in tree_iter(outputs):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(_refuse_second_derivative)
                break
        if self.context.in_place:
            return
        watched = [t for t in tree_iter(inputs) if isinstance(t, Tensor) and t.requires_grad]
        left = [len(watched)]

        def arrived(_: Tensor) -> None:
            left[0] -= 1
            if left[0] == 0:
                left[0] = len(watched)
                self.leave_backward()

        for tensor in watched:
            tensor.register_hook(arrived)  # type: ignore[no-untyped-call]


def _refuse_second_derivative(_: tuple[Tensor, ...]) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(SECOND_DERIVATIVE)


def input_versions(args: Any, kwargs: Any) -> tuple[int, ...]:
    """Version counters of all tensors among a call's arguments."""
    return tuple(t._version for t in tree_iter((args, kwargs)) if isinstance(t, Tensor) and not t.is_inference())


class BufferReplay:
    """Buffers that a forward changes (running statistics, balance biases): the second pass gets copies of what they were before the first.

    Batch norm changes its statistics without raising their version, so such buffers are found by comparing values, once for each state of the
    training flags.
    """

    def __init__(self, module: nn.Module, changing: dict[tuple[bool, ...], set[tuple[int, str]]]) -> None:
        self._owners = [m for m in module.modules() if m._buffers]
        self._changing = changing
        self._before: list[tuple[nn.Module, str, Tensor]] = []

    @contextmanager
    def pass_(self, again: bool) -> Iterator[None]:
        """Around the first (`again` False) or the second pass."""
        if not self._owners:
            yield
        elif again:
            now = [(owner, name, owner._buffers[name]) for owner, name, _ in self._before]
            try:
                for owner, name, value in self._before:
                    owner._buffers[name] = value.clone()
                yield
            finally:
                for owner, name, current in now:
                    owner._buffers[name] = current
        else:
            key = tuple(owner.training for owner in self._owners)
            known = self._changing.get(key)
            self._before = [
                (owner, name, value.clone())
                for i, owner in enumerate(self._owners)
                for name, value in owner._buffers.items()
                if value is not None and (known is None or (i, name) in known)
            ]
            yield
            if known is None:
                index = {id(owner): i for i, owner in enumerate(self._owners)}
                self._before = [(o, n, v) for o, n, v in self._before if o._buffers[n] is None or not _same(v, o._buffers[n])]
                self._changing[key] = {(index[id(o)], n) for o, n, _ in self._before}


def _same(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and a.shape == b.shape and bool(torch.equal(a, b))


class SiteForward:
    """Stands in for a site's `forward` during a run. A copy or a pickle of the module gets the module's own forward instead."""

    def __init__(self, context: StreamContext, site: Site) -> None:
        self.context = context
        self.site = site
        self.original: Callable[..., Any] = site.module.forward
        self.was_instance_attribute = "forward" in site.module.__dict__
        self._changing: dict[tuple[bool, ...], set[tuple[int, str]]] = {}
        self.__wrapped__ = self.original  # inspect.signature

    def install(self) -> None:
        self.site.module.forward = self

    def remove(self) -> None:
        """Give the module its own forward back. Idempotent."""
        if self.site.module.__dict__.get("forward") is self:
            del self.site.module.forward
            if self.was_instance_attribute:
                self.site.module.forward = self.original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.site.loose:
            return self._with_copies(args, kwargs)
        if not torch.is_grad_enabled():
            return self._without_grad(args, kwargs)
        call = SiteCall(self.context, self.site)
        if id(self.site.module) not in self.context.recompute_sites:
            out = call.keep(self.original, args, kwargs)
        else:
            replay = BufferReplay(self.site.module, self._changing)
            # arguments as two trees, so that checkpoint finds their devices and takes none of the keywords for its own
            out = checkpoint(call.run, self.original, input_versions(args, kwargs), torch.get_default_dtype(), replay, args, kwargs, use_reentrant=False)
        call.watch((args, kwargs), out)
        return out

    def _without_grad(self, args: Any, kwargs: Any) -> Any:
        call = SiteCall(self.context, self.site)
        slots = call.acquire()
        if self.context.in_place:
            return self.original(*args, **kwargs)
        try:
            with call.swapped([view.detach() for view in call.views(slots)]):
                return self.original(*args, **kwargs)
        finally:
            call.release(slots)

    def _with_copies(self, args: Any, kwargs: Any) -> Any:
        if self.context.in_place:
            return self.original(*args, **kwargs)
        with loose_copies(self.context, self.site):
            return self.original(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._plain(copy.deepcopy(self.site.module, memo))

    def __reduce__(self) -> Any:
        return _plain_forward, (self.site.module, self.original if self.was_instance_attribute else None)

    def _plain(self, module: nn.Module) -> Any:
        return _plain_forward(module, self.original if self.was_instance_attribute else None)


def _plain_forward(module: nn.Module, original: Any) -> Any:
    return original if original is not None else types.MethodType(type(module).forward, module)


@contextmanager
def loose_copies(context: StreamContext, site: Site) -> Iterator[None]:
    """A leftover's own parameters on the device, by differentiable copies, for the time of one call."""
    call = SiteCall(context, site)
    device = context.streamer.engine.device
    parameters = [owner._parameters[attribute] for owner, attribute, _, _ in site.slots]
    with call.swapped([p.to(device, copy=True) for p in parameters if p is not None]):
        yield
