"""`OffloadPolicy`: every knob of the strategy in one frozen dataclass, validated when it is made.

Knows values and their ranges; knows nothing of torch, Lightning or a machine.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)\s*$")
_FACTORS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_bytes(text: str) -> int:
    """`"8GiB"` to 8589934592. Raises ValueError for anything that is not a number and a unit."""
    match = _SIZE.match(text)
    if match is None:
        raise ValueError(f"found {text!r}, expected a size such as '8GiB' or '500MB'")
    return int(float(match[1]) * _FACTORS[match[2]])


class StepMode(enum.Enum):
    """When the host updates weights in one step; the values are those of `OffloadPolicy.optimizer_step`."""

    AFTER_BACKWARD = "after_backward"
    OVERLAP_BACKWARD = "overlap_backward"
    OVERLAP_FORWARD = "overlap_forward"


@dataclass(frozen=True)
class OffloadPolicy:
    """How a model is kept in host memory and streamed. All defaults are good ones; each field can be swept from Hydra.

    Args:
        units: `"auto"`, or class names of the submodules that are streamed as one.
        prefetch_depth: units copied to the device ahead of the one that computes; each costs one unit of device memory.
        resident: spare device memory that keeps units from one pass to the next: `"auto"`, 0, bytes or `"8GiB"`.
        optimizer_step: when the host updates weights. `"overlap_backward"` updates a unit as soon as its gradient is there and
            stores no gradient; it needs a run in which nothing reads all gradients at once. `"overlap_forward"` updates it just before the next forward needs
            it, also with clipping and accumulation. `"after_backward"` is Lightning's order.
        grad_dtype: dtype of host gradients. `"auto"`: the parameter's, fp32 as soon as they are accumulated.
        master: bf16-true only. `"split"`: the exact fp32 master as a bf16 plane and a 16-bit trail; `"none"`: plain bf16 weights.
        moments: dtype of Adam's moments.
        host_optimizer: `"auto"`: the fused kernel for AdamW and Adam; `"torch"`: always the optimizer's own step.
        activations: where the units' saved inputs wait for backward.
        recompute: how many units (the first ones) run forward again in backward: `"auto"`, `"all"`, `"none"` or a count.
        embedding: where lookups run.
        pin_memory: page-locked host buffers; `"auto"` where the device is a GPU.
        storage: `"ram"`, or a folder on a fast disk.
        rows_per_pass: batch rows that go through a unit at a time, `"all"` or a count.
        compile: torch.compile the blocks, one compilation for each class; also done where the module comes compiled.
        engine: how units reach the device. `"auto"`: in place on a CPU, torch's streams on a GPU; `"emulated"`: copies in threads into
            separate CPU memory, to see and test the pipeline without a GPU.
        emulated_h2d_gbps, emulated_d2h_gbps: the emulated bus each way, in GB/s.
        emulated_jitter_seconds: largest random delay of an emulated copy.
    """

    units: str | tuple[str, ...] = "auto"
    prefetch_depth: int = 2
    resident: int | str = "auto"
    optimizer_step: str = "auto"
    grad_dtype: str = "auto"
    master: str = "split"
    moments: str = "fp32"
    host_optimizer: str = "auto"
    activations: str = "device"
    recompute: int | str = "auto"
    embedding: str = "auto"
    pin_memory: bool | str = "auto"
    storage: str = "ram"
    rows_per_pass: int | str = "all"
    compile: bool = False
    engine: str = "auto"
    emulated_h2d_gbps: float = 16.0
    emulated_d2h_gbps: float = 16.0
    emulated_jitter_seconds: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.units, str):
            if self.units != "auto":
                object.__setattr__(self, "units", (self.units,))
        else:
            object.__setattr__(self, "units", tuple(self.units))
            if not self.units or not all(isinstance(name, str) for name in self.units):
                raise ValueError(f"OffloadPolicy.units: found {self.units!r}, expected 'auto' or a list of class names such as ['LlamaDecoderLayer']")
        self._choice("optimizer_step", "auto", *(mode.value for mode in StepMode))
        self._choice("grad_dtype", "auto", "param", "fp32")
        self._choice("master", "split", "none")
        self._choice("moments", "fp32", "bf16")
        self._choice("host_optimizer", "auto", "torch")
        self._choice("activations", "device", "host")
        self._choice("embedding", "auto", "host", "device")
        self._choice("pin_memory", "auto", True, False)
        self._choice("compile", True, False)
        self._choice("engine", "auto", "direct", "emulated")
        self._count("prefetch_depth", minimum=0)
        self._count("recompute", "auto", "all", "none", minimum=0)
        self._count("rows_per_pass", "all", minimum=1)
        if isinstance(self.resident, str) and self.resident != "auto":
            try:
                parse_bytes(self.resident)
            except ValueError as error:
                raise ValueError(f"OffloadPolicy.resident: {error}, 'auto' or a count of bytes") from None
        elif not isinstance(self.resident, str):
            self._count("resident", minimum=0)
        if not isinstance(self.storage, str) or not self.storage:
            raise TypeError(f"OffloadPolicy.storage: found {self.storage!r}, expected 'ram' or a folder")
        for name, minimum in (("emulated_h2d_gbps", 1e-9), ("emulated_d2h_gbps", 1e-9), ("emulated_jitter_seconds", 0.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value < minimum:
                raise ValueError(f"OffloadPolicy.{name}: found {value!r}, expected a number {'above' if minimum else 'of at least'} 0")

    def _choice(self, name: str, *choices: object) -> None:
        value = getattr(self, name)
        if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
            raise ValueError(f"OffloadPolicy.{name}: found {value!r}, expected one of {', '.join(map(repr, choices))}")

    def _count(self, name: str, *words: str, minimum: int) -> None:
        value = getattr(self, name)
        if isinstance(value, str) and value in words:
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            also = "".join(f"{word!r} or " for word in words)
            raise ValueError(f"OffloadPolicy.{name}: found {value!r}, expected {also}a whole number of at least {minimum}")

    @classmethod
    def of(cls, value: OffloadPolicy | Mapping[str, Any] | None) -> OffloadPolicy:
        """A policy from itself, from a mapping of fields (a dict or an OmegaConf node), or from None for all defaults.

        Raises TypeError for a field that does not exist, with the names of those that do.
        """
        if isinstance(value, cls):
            return value
        if value is None:
            return cls()
        if not isinstance(value, Mapping):
            raise TypeError(f"offload: found {type(value).__name__}, expected an OffloadPolicy, a dict of its fields, or None")
        fields = {str(key): item for key, item in value.items() if key != "_target_"}
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(fields) - set(known))
        if unknown:
            raise TypeError(f"offload: unknown field {', '.join(map(repr, unknown))}; the fields are {', '.join(known)}")
        return cls(**fields)
