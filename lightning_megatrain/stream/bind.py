"""Binding of weights: one site's forward with its units on the device.

`Bind` is the one autograd function: host parameters in, views of the slots out; its backward gets all of a site's weight gradients at once.
`SiteForward` replaces a site's `forward` for the length of a run. A site that recomputes goes through torch's own checkpoint, whose second pass acquires
and binds again; otherwise a saved-tensors hook turns each saved view of a slot into a handle, so that nothing keeps the slot, and backward acquires
the unit again.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lightning_megatrain.host.allocator import HeapWatch
from lightning_megatrain.host.store import HostStore
from lightning_megatrain.stream.compiled import compiled_forward
from lightning_megatrain.stream.landing import GradientLander
from lightning_megatrain.stream.parking import Parking, bring_back, changed
from lightning_megatrain.stream.recompute import BufferReplay, ChangingBuffers, KeptBytes, RecomputePlan
from lightning_megatrain.stream.record import Lane, Mark, Recorder
from lightning_megatrain.stream.rows import join_rows, split_rows
from lightning_megatrain.stream.slots import DeviceSlot
from lightning_megatrain.stream.streamer import LayerStreamer
from lightning_megatrain.stream.tensors import first_tensor, input_versions, tensors_in
from lightning_megatrain.units import Site

SECOND_DERIVATIVE = "second derivatives (create_graph=True) are not supported through streamed units; train this module with strategy='auto'"


@dataclass(eq=False)
class StreamContext:
    """What every site of a run shares."""

    streamer: LayerStreamer
    lander: GradientLander
    store: HostStore
    recompute: RecomputePlan
    recorder: Recorder
    parking: Parking | None = None
    """Where saved inputs wait; None: on the device."""
    rows: int | None = None
    """Batch rows that go through a block at a time."""
    host_lookup: str = "auto"
    """`OffloadPolicy.embedding`."""
    heap: HeapWatch = field(default_factory=HeapWatch)
    open_calls: list[SiteCall] = field(default_factory=list)
    anchor: Tensor = field(init=False)
    """An empty tensor on the device."""

    def __post_init__(self) -> None:
        self.anchor = torch.empty(0, device=self.streamer.engine.device)

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
            self.heap.note()
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
    """One call of a site, from its forward to the end of its backward.

    Args:
        context: the run's.
        site: whose call.
        on_host: it uses the host's weights in place: the device is the CPU, or it is a lookup of which only the rows cross.
    """

    def __init__(self, context: StreamContext, site: Site, *, on_host: bool) -> None:
        self.context = context
        self.site = site
        self.on_host = on_host
        self._bound: tuple[Tensor, ...] = ()
        self._forward_slots: list[DeviceSlot] = []
        self._held: list[DeviceSlot] = []
        self._measured: KeptBytes | None = None
        self._backward_began: Mark | None = None

    @property
    def _unit(self) -> int:
        return self.site.units[-1] if self.site.units else -1

    # forward

    def acquire(self) -> list[DeviceSlot]:
        """The site's units on the device; nothing where they are used in place."""
        if self.on_host:
            for unit in self.site.units:
                self.context.streamer.updates.ensure(unit)
            return []
        return [self.context.streamer.acquire(unit) for unit in self.site.units]

    def release(self, slots: list[DeviceSlot]) -> None:
        for slot in slots:
            self.context.streamer.release(slot)

    def views(self, slots: list[DeviceSlot]) -> list[Tensor]:
        """The site's weights on the device, in the order of its slots' parameters."""
        if self.on_host:
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

    def forward(self, original: Callable[..., Any], changing: ChangingBuffers, args: Any, kwargs: Any) -> Any:
        """The site's forward with gradients: its units are there once for all slices of the batch, and bound once, so that their gradients come at once."""
        plan = self.context.recompute
        first = first_tensor(args, kwargs)
        input_bytes = first.numel() * first.element_size() if first is not None else 0
        again = plan.recomputes(self.site, input_bytes, self.context.streamer.engine.device.type)
        calls = split_rows(args, kwargs, self.context.rows if self.site.recomputable else None)
        slots = self.acquire()
        began = self._mark()
        try:
            self._bound = self.bind(slots)
            self._forward_slots = slots
            if not again and plan.measures(self.site):
                self._measured = KeptBytes((args, kwargs, self._bound))
            outputs = [self._recomputing(original, changing, *call) if again else self._keeping(original, *call) for call in calls]
            if self._measured is not None:
                plan.note(self.site, self._measured.nbytes, input_bytes)
            return join_rows(outputs, calls, self.site.name)
        finally:
            self._bound, self._forward_slots, self._measured = (), [], None
            self._note(began)
            self.release(slots)

    def plain(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Forward without gradients."""
        calls = split_rows(args, kwargs, self.context.rows if self.site.recomputable else None)
        slots = self.acquire()
        try:
            with nullcontext() if self.context.in_place else self.swapped([view.detach() for view in self.views(slots)]):
                return join_rows([original(*args, **kwargs) for args, kwargs in calls], calls, self.site.name)
        finally:
            self.release(slots)

    def _keeping(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Keeps what autograd saves, weights excepted."""
        with self.swapped(self._bound):
            if self.on_host and self._measured is None:
                return original(*args, **kwargs)
            with saved_tensors_hooks(self._pack, self._unpack):
                return original(*args, **kwargs)

    def _recomputing(self, original: Callable[..., Any], changing: ChangingBuffers, args: Any, kwargs: Any) -> Any:
        """Through torch's checkpoint: the first pass uses what is bound, the second asks for the units again and leaves them to backward."""
        replay = BufferReplay(self.site.module, changing)
        dtype = torch.get_default_dtype()
        ran = False

        def run(_: Tensor) -> Any:
            nonlocal ran
            again, ran = ran, True
            if not again:
                with self.swapped(self._bound), replay.pass_(False):
                    return original(*now[0], **now[1])
            saved_args, saved_kwargs = args, kwargs
            if versions != input_versions(args, kwargs) or (parking is not None and changed((args, kwargs))):
                raise RuntimeError(
                    f"an input of {self.site.name} ({type(self.site.module).__name__}) was changed by an in-place operation after its forward, "
                    "and is needed again in backward; clone it first, or set offload.recompute='none'"
                )
            if not self._held:
                self._enter_backward(self.acquire())
            if parking is not None:
                saved_args, saved_kwargs = bring_back((args, kwargs))
            previous = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                with self.swapped(self.bind(self._held)), replay.pass_(True):
                    return original(*saved_args, **saved_kwargs)
            finally:
                torch.set_default_dtype(previous)

        parking = self.context.parking
        now = [args, kwargs]  # emptied after the first pass: what is parked must not stay on the device
        if parking is not None:
            args, kwargs = parking.park(args, kwargs)
        versions = input_versions(args, kwargs)
        # checkpoint sees the device only: it would walk through the arguments with pytree, twice a call
        out = checkpoint(run, self.context.anchor, use_reentrant=False)
        now.clear()
        return out

    # backward

    def _mark(self) -> Mark | None:
        return self.context.streamer.engine.compute.mark() if self.context.recorder.on else None

    def _note(self, began: Mark | None, *, backward: bool = False) -> None:
        """A piece of the site's compute ends."""
        if began is not None:
            self.context.recorder.add(Lane.COMPUTE, self._unit, began, self.context.streamer.engine.compute.mark(), backward=backward)

    def _pack(self, tensor: Tensor) -> Any:
        if self._measured is not None and not any(slot.owns(tensor) for slot in self._forward_slots):
            self._measured.add(tensor)
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
        self._backward_began = self._mark()

    def leave_backward(self) -> None:
        """Let the slots go that backward holds. Idempotent."""
        held, self._held = self._held, []
        self.release(held)

    def land(self, gradients: Sequence[Tensor | None], nodes: Sequence[Node | None]) -> list[Tensor | None]:
        """All weight gradients of this call; returns what goes on to autograd, one a parameter."""
        self.context.in_backward(self)
        self._note(self._backward_began, backward=True)
        self._backward_began = None
        out: list[Tensor | None] = [None] * len(gradients)
        for unit in self.site.units:
            host = self.context.store.units[unit]
            at = [i for i, (_, _, u, _) in enumerate(self.site.slots) if u == unit]
            places = [host.parameters[self.site.slots[i][3]] for i in at]
            landed = self.context.lander.land(host, places, [gradients[i] for i in at], [nodes[i] for i in at], on_host=self.on_host)
            for i, gradient in zip(at, landed, strict=True):
                out[i] = gradient
        self.leave_backward()
        return out

    def watch(self, inputs: Any, outputs: Any) -> None:
        """Refuse second derivatives, and let slots go when the inputs' gradients are there, also where no weight gets one."""
        for tensor in tensors_in(outputs):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._begins)
                break
        if self.on_host:
            return
        watched = [t for t in tensors_in(inputs) if t.requires_grad]
        count = left = len(watched)  # the hook must not hold the tensors

        def arrived(_: Tensor) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                left = count
                self.leave_backward()

        for tensor in watched:
            tensor.register_hook(arrived)  # type: ignore[no-untyped-call]

    def _begins(self, _: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(SECOND_DERIVATIVE)
        self._backward_began = self._mark()


class SiteForward:
    """Stands in for a site's `forward` during a run. A copy or a pickle of the module gets the module's own forward instead."""

    def __init__(self, context: StreamContext, site: Site, *, compile: bool = False) -> None:
        self.context = context
        self.site = site
        self.original: Callable[..., Any] = site.module.forward
        self._forward = compiled_forward(site.module) if compile else self.original
        self._compiled_call = site.module._compiled_call_impl
        self.was_instance_attribute = "forward" in site.module.__dict__
        self._changing: ChangingBuffers = {}
        self.__wrapped__ = self.original  # inspect.signature

    def install(self) -> None:
        self.site.module.forward = self
        self.site.module._compiled_call_impl = None  # what `module.compile()` set would trace through this

    def remove(self) -> None:
        """Give the module its own forward back. Idempotent."""
        if self.site.module.__dict__.get("forward") is self:
            del self.site.module.forward
            self.site.module._compiled_call_impl = self._compiled_call
            if self.was_instance_attribute:
                self.site.module.forward = self.original

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.site.loose:
            return self._with_copies(args, kwargs)
        lookup = self._rows_only(args)
        call = SiteCall(self.context, self.site, on_host=self.context.in_place or lookup)
        device = self.context.streamer.engine.device
        if lookup:
            args = tuple(arg.to("cpu") if isinstance(arg, Tensor) else arg for arg in args)
        if torch.is_grad_enabled():
            out = call.forward(self._forward, self._changing, args, kwargs)
            call.watch((args, kwargs), out)
        else:
            out = call.plain(self._forward, args, kwargs)
        return out.to(device) if lookup else out

    def _rows_only(self, args: Any) -> bool:
        """Whether this is a lookup that moves fewer bytes as rows: the host looks up, the rows cross, and their gradients come back."""
        module = self.site.module
        if self.context.in_place or not isinstance(module, nn.Embedding) or self.was_instance_attribute or type(module).forward is not nn.Embedding.forward:
            return False
        setting, ids = self.context.host_lookup, args[0] if args else None
        return isinstance(ids, Tensor) and (setting == "host" or (setting == "auto" and ids.numel() < module.num_embeddings))

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
    call = SiteCall(context, site, on_host=context.in_place)
    device = context.streamer.engine.device
    parameters = [owner._parameters[attribute] for owner, attribute, _, _ in site.slots]
    with call.swapped([p.to(device, copy=True) for p in parameters if p is not None]):
        yield
