"""`MemoryReport`: measured bytes by kind, and what a process and a machine hold."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from lightning_megatrain.host.store import HostStore


class _HasOptimizer(Protocol):
    optimizer: Optimizer


@dataclass(frozen=True)
class MemoryReport:
    """Bytes by kind.

    Attributes:
        parameters: number of parameters, tied ones once.
        weights_bytes: the host's weights (or bf16 planes).
        trail_bytes: 16-bit trails of split masters.
        gradients_bytes: the most that was held at the end of a backward pass; 0 where the step overlaps backward.
        optimizer_bytes: optimizer state.
        transient_bytes: gradients of one unit on their way to an overlapped update.
        device_slots_bytes, device_slabs_bytes: device memory of streamed weights and of leaving gradients.
    """

    parameters: int
    weights_bytes: int
    trail_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    transient_bytes: int
    device_slots_bytes: int
    device_slabs_bytes: int

    @property
    def host_bytes(self) -> int:
        return self.weights_bytes + self.trail_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def device_bytes(self) -> int:
        return self.device_slots_bytes + self.device_slabs_bytes

    @property
    def bytes_per_parameter(self) -> float:
        """Host bytes a parameter, without the one unit in transit."""
        return self.host_bytes / max(self.parameters, 1)

    @classmethod
    def measure(cls, store: HostStore, *, device_slots: int, slabs: int, steps: Sequence[_HasOptimizer]) -> MemoryReport:
        state = 0
        seen: set[int] = set()
        for step in steps:
            for values in step.optimizer.state.values():
                for value in values.values():
                    if isinstance(value, Tensor) and value.data_ptr() not in seen:
                        seen.add(value.data_ptr())
                        state += value.numel() * value.element_size()
        return cls(
            parameters=sum(place.count for host in store for place in host.parameters),
            weights_bytes=sum(host.weights.nbytes for host in store),
            trail_bytes=sum(host.trail.nbytes for host in store if host.trail is not None),
            gradients_bytes=store.gradient_bytes,
            optimizer_bytes=state,
            transient_bytes=store.overlapped_bytes,
            device_slots_bytes=device_slots,
            device_slabs_bytes=slabs,
        )

    def __str__(self) -> str:
        rows = [
            ("weights", self.weights_bytes), ("trail", self.trail_bytes), ("gradients", self.gradients_bytes), ("optimizer state", self.optimizer_bytes),
            ("in transit", self.transient_bytes), ("device slots", self.device_slots_bytes), ("device slabs", self.device_slabs_bytes),
        ]  # fmt: skip
        lines = [f"{name:<16}{human_bytes(value):>12}" for name, value in rows]
        return "\n".join([*lines, f"{'host in all':<16}{human_bytes(self.host_bytes):>12}  {self.bytes_per_parameter:.2f} bytes a parameter"])


def human_bytes(count: float) -> str:
    """1536 to `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def process_bytes() -> int:
    """Resident memory of this process."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux: the peak is what the system tells
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
