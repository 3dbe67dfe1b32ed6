"""`HostStore`: where every parameter's weight, trail and moments live for the length of a run.

Owns one `HostBuffer` a unit and kind. A parameter stays the object that the user made; its data becomes a view of its unit's buffer.
Invariants: a split parameter's data is the bf16 plane of its master; buffers are allocated exactly, and moments only when first asked for.
Knows bytes; knows nothing of devices, autograd or Lightning.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_megatrain.host.buffer import HostBuffer, Lane
from lightning_megatrain.host.master import combine, split_
from lightning_megatrain.units import StreamUnit

_FLOATS = (torch.float32, torch.float64, torch.float16)
_ALIGN = 32  # elements: a cache line of the narrowest plane


@dataclass(eq=False)
class HostParameter:
    """One parameter's place in its unit.

    Attributes:
        parameter: the user's object.
        name: its dotted name.
        dtype: dtype of its weights in the store.
        byte_offset: in the unit's weights.
        element_offset: in the unit's other planes (trail, moments, gradients).
        weight: the view that is the parameter's data.
        trail: int16 view, for a split parameter.
    """

    parameter: nn.Parameter
    name: str
    dtype: torch.dtype
    byte_offset: int
    element_offset: int
    weight: Tensor
    trail: Tensor | None = None
    version: int = 0
    moments: dict[int, Tensor] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return self.weight.numel()

    def master(self) -> Tensor:
        """A new tensor with the exact value: fp32 for a split parameter, else the weight's own dtype."""
        return self.weight.clone() if self.trail is None else combine(self.weight, self.trail)

    def write_master(self, value: Tensor) -> None:
        """Store an exact value, of `master()`'s shape and dtype."""
        if self.trail is None:
            self.weight.copy_(value)
        else:
            split_(value.float().contiguous(), self.weight, self.trail)


@dataclass(eq=False)
class HostUnit:
    """The host memory of one `StreamUnit`."""

    unit: StreamUnit
    parameters: list[HostParameter]
    weights: HostBuffer
    elements: int
    trail: HostBuffer | None = None
    moments: dict[int, HostBuffer] = field(default_factory=dict)
    sample: Tensor | None = None
    updates: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the weights: what one copy to the device moves."""
        return self.weights.nbytes

    def sampled(self) -> Tensor:
        """A few bit patterns spread over each parameter, (n,) int16: they differ after anybody wrote more than single elements."""
        return torch.cat([_part(place).short() for place in self.parameters if place.count] or [torch.empty(0)])


class HostStore:
    """Adopts a module's parameters unit by unit and hands out the memory of their state.

    Args:
        units: what `find_units` found; parameters on the CPU.
        compute_dtype: dtype that fp32 weights take in the store, or None to leave every dtype as it is.
        split: keep the exact fp32 master of weights that were rounded to `compute_dtype` = bf16.
        moments_dtype: dtype of the optimizer's moments.
        pin: page-lock the weights.
        kept: ids of parameters that don't take `compute_dtype`.

    Peak memory while adopting: the module and one unit.
    """

    def __init__(
        self,
        units: Sequence[StreamUnit],
        *,
        compute_dtype: torch.dtype | None,
        split: bool,
        moments_dtype: torch.dtype,
        pin: bool,
        kept: Collection[int] = (),
    ) -> None:
        self._moments_dtype = moments_dtype
        self._pin = pin
        self._kept = kept
        self.plain_bf16 = compute_dtype == torch.bfloat16 and not split  # bf16 weights are all there is of them
        self.gradient_bytes = 0  # most bytes of gradients seen at the end of a backward
        self.overlapped_bytes = 0  # most bytes of gradients on their way to an overlapped update
        self._by_parameter: dict[int, HostParameter] = {}
        self._by_address: dict[int, HostParameter] = {}
        self._unit_of: dict[int, HostUnit] = {}
        self.units: list[HostUnit] = []
        keep_fp32 = compute_dtype is not None and any(p.dtype == compute_dtype for unit in units for p in unit.parameters)
        for unit in units:
            self.units.append(self._adopt(unit, None if keep_fp32 else compute_dtype, split))

    def _adopt(self, unit: StreamUnit, compute_dtype: torch.dtype | None, split: bool) -> HostUnit:
        meta = [name for name, p in zip(unit.names, unit.parameters, strict=True) if p.is_meta]
        if meta:
            raise ValueError(
                f"parameter {meta[0]} is on the meta device, expected real values; fill the module in configure_model before the strategy takes it"
            )
        rounds = [compute_dtype is not None and id(p) not in self._kept and p.dtype in _FLOATS for p in unit.parameters]
        dtypes = [compute_dtype if rounded and compute_dtype is not None else p.dtype for p, rounded in zip(unit.parameters, rounds, strict=True)]
        offsets, element_offsets, nbytes, elements = _layout(unit.parameters, dtypes)
        weights = HostBuffer(nbytes, pin=self._pin)
        # a weight that is bf16 already has a master too: it starts with an empty trail
        has_trails = [split and dtype == torch.bfloat16 for dtype in dtypes]
        trail = HostBuffer(2 * elements, lane=Lane.TRAIL) if any(has_trails) else None
        host = HostUnit(unit, [], weights, elements, trail)
        for p, name, dtype, at, element, has_trail in zip(unit.parameters, unit.names, dtypes, offsets, element_offsets, has_trails, strict=True):
            place = HostParameter(p, name, dtype, at, element, weights.tensor(at, dtype, p.shape))
            if has_trail and trail is not None:
                place.trail = trail.tensor(2 * element, torch.int16, p.shape)
            with torch.no_grad():
                place.write_master(p.detach())
            p.data = place.weight
            place.version = p._version
            host.parameters.append(place)
            self._by_parameter[id(p)] = place
            if place.count:
                self._by_address[place.weight.data_ptr()] = place
            self._unit_of[id(p)] = host
        self.note_written(host)
        return host

    def __iter__(self) -> Iterator[HostUnit]:
        return iter(self.units)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers allocated so far."""
        buffers = [b for host in self.units for b in (host.weights, host.trail, *host.moments.values()) if b is not None]
        return sum(b.nbytes for b in buffers)

    def find(self, parameter: Tensor) -> HostParameter | None:
        """The place of a parameter, or None if the store does not hold it."""
        return self._by_parameter.get(id(parameter))

    def find_weight(self, value: Tensor) -> HostParameter | None:
        """The place of a weight as a state dict shows it (a view of the store's memory), or None for any other tensor."""
        place = self._by_address.get(value.data_ptr())
        return place if place is not None and value.shape == place.weight.shape else None

    def unit_of(self, parameter: Tensor) -> HostUnit:
        return self._unit_of[id(parameter)]

    def moment(self, parameter: Tensor, which: int) -> Tensor:
        """The first (0) or second (1) moment of a parameter: the same view at each call, zeros at first."""
        place = self._by_parameter[id(parameter)]
        if which not in place.moments:
            host = self._unit_of[id(parameter)]
            if which not in host.moments:
                host.moments[which] = HostBuffer(host.elements * self._moments_dtype.itemsize, lane=(Lane.EXP_AVG, Lane.EXP_AVG_SQ)[which])
            at = place.element_offset * self._moments_dtype.itemsize
            place.moments[which] = host.moments[which].tensor(at, self._moments_dtype, place.weight.shape)
        return place.moments[which]

    def note_written(self, host: HostUnit) -> None:
        """A unit was written by us: what differs from now on was written by somebody else."""
        host.updates += 1
        if host.trail is not None:
            host.sample = _sample(host)
            for place in host.parameters:
                place.version = place.parameter._version

    def follow_writes(self) -> list[str]:
        """Refresh the masters of split weights that were written past the store (copy_, fill_, load_state_dict); their names.

        The new bf16 values then are the exact masters: their trail is zeroed.
        """
        changed = []
        for host in self.units:
            if host.trail is None or host.sample is None:
                continue
            touched = [place for place in host.parameters if place.trail is not None and place.parameter._version != place.version]
            if not torch.equal(_sample(host), host.sample):
                touched = [place for place in host.parameters if place.trail is not None and (place in touched or not _same_sample(host, place))]
            for place in touched:
                assert place.trail is not None
                place.trail.zero_()
                changed.append(place.name)
            if touched:
                self.note_written(host)
        return changed

    def find_replaced(self) -> str | None:
        """Name of the first parameter whose data no longer is its view of the store, or None."""
        with torch._C.DisableTorchFunctionSubclass():  # a weight that is about to be updated is asked for its address only
            for host in self.units:
                for place in host.parameters:
                    if place.parameter.data_ptr() != place.weight.data_ptr() or place.parameter.shape != place.weight.shape:
                        return place.name
        return None

    def masters(self) -> dict[str, Tensor]:
        """Exact weights by parameter name, fp32, copies."""
        return {place.name: place.master().float() for host in self.units for place in host.parameters}

    def holds(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the store holds exactly these parameters, with their data still in place."""
        ids = {id(p) for p in parameters}
        return ids == set(self._by_parameter) and self.find_replaced() is None

    def pin(self) -> None:
        """Page-lock all weights. Idempotent."""
        for host in self.units:
            host.weights.pin()

    def close(self) -> None:
        """Unlock all pages. The weights stay where the module's parameters point."""
        for host in self.units:
            host.weights.close()


def _layout(parameters: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> tuple[list[int], list[int], int, int]:
    """Byte offset of each weight, element offset of each, bytes of the weights, elements of the other planes."""
    offsets, elements, at, element = [], [], 0, 0
    for p, dtype in zip(parameters, dtypes, strict=True):
        offsets.append(at)
        elements.append(element)
        rounded = -(-p.numel() // _ALIGN) * _ALIGN
        at += rounded * max(dtype.itemsize, 2)
        element += rounded
    return offsets, elements, at, element


def _sample(host: HostUnit) -> Tensor:
    return torch.cat([_part(place) for place in host.parameters if place.trail is not None] or [torch.empty(0)])


def _part(place: HostParameter) -> Tensor:
    """A few bit patterns spread over one parameter."""
    flat = place.weight.view(-1)
    bits = flat.view(torch.int16) if flat.element_size() > 1 else flat
    return bits[:: max(1, bits.numel() // 64)]


def _same_sample(host: HostUnit, place: HostParameter) -> bool:
    assert host.sample is not None
    at = 0
    for other in host.parameters:
        if other.trail is None:
            continue
        part = _part(other)
        if other is place:
            return torch.equal(part, host.sample[at : at + part.numel()])
        at += part.numel()
    raise KeyError(place.name)
