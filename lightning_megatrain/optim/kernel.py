"""`HostKernel`: the fused Adam step over host memory, in C++ where the library was built, in torch where it was not.

Owns its threads (they sleep between steps). Both ways compute the same bits: the arithmetic of `torch.optim.AdamW(fused=True)`.
"""

from __future__ import annotations

import ctypes
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from lightning_megatrain.host.master import combine_, split_

_log = logging.getLogger(__name__)
_FALLBACK_CHUNK = 1 << 22  # elements
_VECTOR = 64  # elements: torch's own fused kernel treats a rest below its vector length by another order, so chunks are padded to this

SEGMENT = np.dtype(
    [(name, np.uint64) for name in ("weight", "trail", "grad", "exp_avg", "exp_avg_sq")]
    + [("count", np.int64)]
    + [(name, np.float32) for name in ("decay", "l2", "one_minus_beta1", "beta2", "one_minus_beta2", "minus_step_size", "correction2_sqrt", "eps")]
)
"""Memory layout of `MtSegment` in kernels.cpp."""


@dataclass(frozen=True)
class AdamScalars:
    """Hyperparameters of one step of one parameter group.

    Attributes:
        lr, beta1, beta2, eps, weight_decay: as in torch.
        decoupled: AdamW's decay (True) or Adam's L2 term (False).
        step: count of this step, from 1.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    step: int

    def rounded(self) -> tuple[float, ...]:
        """The scalars of `MtSegment`, computed in double."""
        return (
            1 - self.lr * self.weight_decay if self.decoupled else 1.0,
            0.0 if self.decoupled else self.weight_decay,
            1 - self.beta1,
            self.beta2,
            1 - self.beta2,
            -(self.lr / (1 - self.beta1**self.step)),
            math.sqrt(1 - self.beta2**self.step),
            self.eps,
        )


@dataclass(eq=False)
class AdamSegment:
    """One tensor's step: CPU tensors of one shape, contiguous.

    Attributes:
        weight: fp32, or bf16 (the high plane when `trail` is given).
        trail: int16, or None.
        grad: fp32 or bf16.
        exp_avg, exp_avg_sq: both fp32 or both bf16.
    """

    weight: Tensor
    trail: Tensor | None
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    scalars: AdamScalars

    @property
    def kind(self) -> tuple[int, int, int]:
        """(master, bf16 gradient, bf16 moments) as `mt_adam` numbers them."""
        master = 0 if self.weight.dtype == torch.float32 else 1 if self.trail is not None else 2
        return master, int(self.grad.dtype == torch.bfloat16), int(self.exp_avg.dtype == torch.bfloat16)


class HostKernel:
    """Runs fused Adam steps with `threads` threads (the caller is one of them).

    Args:
        threads: default: as many as torch uses, so that a step that runs between torch's own work takes the same cores.
        library: path of the shared library; default: the one built with the package; `""` for the torch fallback.
    """

    def __init__(self, threads: int | None = None, library: str | None = None) -> None:
        path = find_library() if library is None else library
        self._library = _load(path) if path else None
        self.threads = threads or torch.get_num_threads()
        self._pool: ctypes.c_void_p | None = None

    @property
    def compiled(self) -> bool:
        """Whether the C++ kernel is used."""
        return self._library is not None

    @property
    def width(self) -> int:
        """0 baseline, 1 AVX2, 2 AVX-512; -1 for the torch fallback."""
        return -1 if self._library is None else int(self._library.mt_widest())

    def adam(self, segments: list[AdamSegment], width: int | None = None) -> None:
        """One in-place step of all segments. `width` forces a narrower instruction set than the machine's (for tests)."""
        if self._library is None:
            for segment in segments:
                _adam_in_torch(segment)
            return
        kinds: dict[tuple[int, int, int], list[AdamSegment]] = {}
        for segment in segments:
            if segment.weight.numel():
                kinds.setdefault(segment.kind, []).append(segment)
        for (master, grad, moments), members in kinds.items():
            rounded: dict[AdamScalars, tuple[float, ...]] = {}
            rows = np.empty(len(members), SEGMENT)
            for i, s in enumerate(members):
                if s.scalars not in rounded:
                    rounded[s.scalars] = s.scalars.rounded()
                trail = s.trail.data_ptr() if s.trail is not None else 0
                rows[i] = (s.weight.data_ptr(), trail, s.grad.data_ptr(), s.exp_avg.data_ptr(), s.exp_avg_sq.data_ptr(), s.weight.numel(), *rounded[s.scalars])
            code = self._library.mt_adam(self._threads(), rows.ctypes.data, len(rows), master, grad, moments, self.width if width is None else width)
            if code:
                raise ValueError(f"the kernel has no variant for master {master}, width {width} on this machine")

    def read_modify_write(self, memory: Tensor) -> None:
        """Add 1 to every 8-byte word of `memory` in place: the rate a fused step can at best reach. Needs the compiled kernel."""
        if self._library is None:
            raise RuntimeError("found no compiled kernel; install a C++ compiler and reinstall the package")
        self._library.mt_read_modify_write(self._threads(), memory.data_ptr(), memory.numel() * memory.element_size() // 8)

    def _threads(self) -> ctypes.c_void_p:
        if self._pool is None:
            assert self._library is not None
            self._pool = ctypes.c_void_p(self._library.mt_pool_create(self.threads))
        return self._pool

    def close(self) -> None:
        """End the threads. Idempotent; a later step starts them again."""
        if self._pool is not None and self._library is not None:
            self._library.mt_pool_destroy(self._pool)
            self._pool = None

    def __enter__(self) -> HostKernel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def find_library() -> str | None:
    """Path of the shared library that was built with the package, or None."""
    found = sorted(Path(__file__).parent.glob("_kernels*.so")) + sorted(Path(__file__).parent.glob("_kernels*.dylib"))
    return str(found[0]) if found else None


def _load(path: str) -> ctypes.CDLL:
    library = ctypes.CDLL(path)
    library.mt_pool_create.restype = ctypes.c_void_p
    library.mt_pool_create.argtypes = [ctypes.c_int]
    library.mt_pool_destroy.argtypes = [ctypes.c_void_p]
    library.mt_adam.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int]
    library.mt_read_modify_write.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    return library


def _adam_in_torch(s: AdamSegment) -> None:
    """The same step by torch's fused operator, a chunk at a time, padded so that every element takes the vector's order."""
    scalars = s.scalars
    operator = torch._fused_adamw_ if scalars.decoupled else torch._fused_adam_
    step = torch.tensor(float(scalars.step))
    planes = [t.view(-1) for t in (s.weight, s.grad, s.exp_avg, s.exp_avg_sq)]
    for at in range(0, s.weight.numel(), _FALLBACK_CHUNK):
        part = slice(at, at + _FALLBACK_CHUNK)
        count = planes[0][part].numel()
        padded = -(-count // _VECTOR) * _VECTOR
        weight, grad, exp_avg, exp_avg_sq = (torch.zeros(padded) for _ in range(4))
        if s.trail is not None:
            combine_(planes[0][part], s.trail.view(-1)[part], weight[:count])
        else:
            weight[:count] = planes[0][part]
        for scratch, plane in ((grad, planes[1]), (exp_avg, planes[2]), (exp_avg_sq, planes[3])):
            scratch[:count] = plane[part]
        operator(
            [weight], [grad], [exp_avg], [exp_avg_sq], [], [step], lr=scalars.lr, beta1=scalars.beta1, beta2=scalars.beta2,
            weight_decay=scalars.weight_decay, eps=scalars.eps, amsgrad=False, maximize=False,
        )  # fmt: skip
        if s.trail is not None:
            split_(weight[:count], planes[0][part], s.trail.view(-1)[part])
        else:
            planes[0][part] = weight[:count].to(s.weight.dtype)
        planes[2][part] = exp_avg[:count].to(s.exp_avg.dtype)
        planes[3][part] = exp_avg_sq[:count].to(s.exp_avg_sq.dtype)
