"""`TrainingPlan`: bytes that a run will hold, by kind, from shapes alone.

Works on modules on the meta device; allocates nothing. The table of bytes a parameter is that of the design: 16 or 12 in fp32, 14 or 12 with the
split bf16 master, 12 or 10 with plain bf16, the smaller one where the step overlaps backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lightning_megatrain.monitor.memory import human_bytes
from lightning_megatrain.policy import OffloadPolicy
from lightning_megatrain.units import find_units

_MOMENTS = {"adamw": 2, "adam": 2, "sgd": 1, "none": 0}
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "64-true")


@dataclass(frozen=True)
class TrainingPlan:
    """Predicted bytes.

    Attributes:
        parameters, trained_parameters: counts, tied ones once.
        precision: Lightning's word.
        policy: the offload policy.
        overlap: the step overlaps backward, so that gradients are not stored.
        weights_bytes, trail_bytes, gradients_bytes, moments_bytes: host memory.
        transient_bytes: host memory of gradients on their way to an overlapped update: the largest unit's.
        device_slots_bytes, device_slabs_bytes: device memory for weights and leaving gradients; activations come on top.
        units: number of streamed units.
    """

    parameters: int
    trained_parameters: int
    precision: str
    policy: OffloadPolicy
    overlap: bool
    weights_bytes: int
    trail_bytes: int
    gradients_bytes: int
    moments_bytes: int
    transient_bytes: int
    device_slots_bytes: int
    device_slabs_bytes: int
    units: int

    @property
    def host_bytes(self) -> int:
        """Host memory of weights, trails, gradients and moments."""
        return self.weights_bytes + self.trail_bytes + self.gradients_bytes + self.moments_bytes

    @property
    def bytes_per_parameter(self) -> float:
        return self.host_bytes / max(self.parameters, 1)

    def rows(self) -> Iterator[tuple[str, int]]:
        """(kind, bytes) of host memory."""
        yield "weights", self.weights_bytes
        yield "trail", self.trail_bytes
        yield "gradients", self.gradients_bytes
        yield "moments", self.moments_bytes

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {human_bytes(value)}" for name, value in self.rows() if value)
        return f"{human_bytes(self.host_bytes)} of host memory ({parts}; {self.bytes_per_parameter:.1f} bytes a parameter)"


def plan(
    model: nn.Module,
    precision: str = "32-true",
    optimizer: str = "adamw",
    offload: OffloadPolicy | Mapping[str, Any] | None = None,
    *,
    overlap: bool | None = None,
) -> TrainingPlan:
    """What training this model will hold; nothing is allocated.

    Args:
        model: any module, also on the meta device.
        precision: "32-true", "bf16-mixed" or "bf16-true".
        optimizer: "adamw", "adam", "sgd" (with momentum) or "none".
        offload: the policy.
        overlap: the step overlaps backward; default: unless the policy says otherwise.

    Raises ValueError for an unknown precision or optimizer.
    """
    policy = OffloadPolicy.of(offload)
    if precision not in PRECISIONS:
        raise ValueError(f"precision: found {precision!r}, expected one of {', '.join(PRECISIONS)}")
    if optimizer not in _MOMENTS:
        raise ValueError(f"optimizer: found {optimizer!r}, expected one of {', '.join(_MOMENTS)}")
    if overlap is None:
        overlap = policy.optimizer_step != "after_backward"
    units, _ = find_units(model, policy.units)
    bf16 = precision == "bf16-true"
    split = bf16 and policy.master == "split"
    moment = 2 if policy.moments == "bf16" else 4
    weights = trail = gradients = moments = transient = trained = 0
    streamed: list[int] = []
    largest = 0
    for unit in units:
        unit_gradients = unit_weights = 0
        for p in unit.parameters:
            itemsize = 2 if bf16 and p.is_floating_point() else p.element_size()
            unit_weights += p.numel() * itemsize
            trail += 2 * p.numel() if split else 0
            if p.requires_grad:
                trained += p.numel()
                gradient = 4 if bf16 and policy.grad_dtype == "fp32" else itemsize
                unit_gradients += p.numel() * gradient
                moments += p.numel() * moment * _MOMENTS[optimizer]
        weights += unit_weights
        if unit.streamed:
            streamed.append(unit_weights)
            largest = max(largest, sum(p.numel() for p in unit.parameters))
        if overlap and unit.streamed:
            transient = max(transient, unit_gradients)
        else:
            gradients += unit_gradients
    return TrainingPlan(
        parameters=sum(p.numel() for unit in units for p in unit.parameters),
        trained_parameters=trained,
        precision=precision,
        policy=policy,
        overlap=overlap,
        weights_bytes=weights,
        trail_bytes=trail,
        gradients_bytes=gradients,
        moments_bytes=moments,
        transient_bytes=transient,
        device_slots_bytes=_slots_bytes(streamed, policy.prefetch_depth),
        device_slabs_bytes=2 * 4 * largest,
        units=len(streamed),
    )


def _slots_bytes(units: list[int], depth: int) -> int:
    """Device bytes of the slot pool: as `SlotPool` makes its size classes."""
    classes: dict[int, int] = {}
    for nbytes in sorted(units, reverse=True):
        size = next((s for s in classes if s * 3 // 4 <= nbytes <= s), nbytes)
        classes[size] = classes.get(size, 0) + 1
    return sum(size * min(count, depth + 2) for size, count in classes.items())


def cheaper(model: nn.Module, current: TrainingPlan, optimizer: str, have: int) -> list[tuple[str, TrainingPlan]]:
    """Settings under which the model would fit into `have` bytes of host memory, each alone or together, least change first."""
    found = []
    changes: list[tuple[str, str, dict[str, Any]]] = []
    if current.precision != "bf16-true":
        changes.append(("trainer.precision=bf16-true", "bf16-true", {}))
    changes.append(("offload.moments=bf16", current.precision, {"moments": "bf16"}))
    changes.append(("trainer.precision=bf16-true offload.moments=bf16", "bf16-true", {"moments": "bf16"}))
    changes.append(("trainer.precision=bf16-true offload.moments=bf16 offload.master=none", "bf16-true", {"moments": "bf16", "master": "none"}))
    for text, precision, fields in changes:
        other = plan(model, precision, optimizer, replace(current.policy, **fields), overlap=current.overlap)
        if other.host_bytes <= have:
            found.append((text, other))
    return found


def module_bytes(model: nn.Module) -> int:
    """Bytes that the model's parameters hold now (0 on the meta device)."""
    seen = {id(p): p for p in model.parameters()}
    return sum(p.numel() * p.element_size() for p in seen.values() if p.device.type == "cpu")
