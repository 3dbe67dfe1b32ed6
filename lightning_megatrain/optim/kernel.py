"""`HostKernel`: the fused Adam and SGD steps over host memory, in C++ where the library was built, in torch where it was not.

Owns its threads (they sleep between steps). Both ways compute the same bits: the arithmetic of `torch.optim.AdamW(fused=True)` and of `torch.optim.SGD`.
"""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Sequence
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


def _layout(pointers: str, floats: str, integers: str = "") -> np.dtype[np.void]:
    kinds = ((np.uint64, pointers), (np.int64, "count"), (np.float32, floats), (np.int32, integers))
    return np.dtype([(name, kind) for kind, names in kinds for name in names.split()], align=True)


ADAM = _layout("weight trail grad exp_avg exp_avg_sq", "decay l2 one_minus_beta1 beta2 one_minus_beta2 minus_step_size correction2_sqrt eps clip")
"""Memory layout of `MtSegment` in kernels.cpp."""
SGD = _layout("weight trail grad momentum", "weight_decay mu one_minus_dampening minus_lr clip", "first nesterov")
"""Memory layout of `MtSgdSegment`."""


@dataclass(frozen=True)
class AdamScalars:
    """Hyperparameters of one step of one parameter group.

    Attributes:
        lr, beta1, beta2, eps, weight_decay: as in torch.
        decoupled: AdamW's decay (True) or Adam's L2 term (False).
        step: count of this step, from 1.
        clip: factor of the gradient, which is rounded to its dtype after it.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    step: int
    clip: float = 1.0

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
            self.clip,
        )


@dataclass(frozen=True)
class SgdScalars:
    """As `AdamScalars`; `first`: the momentum takes this gradient as it is."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    first: bool
    clip: float = 1.0

    def rounded(self) -> tuple[float, ...]:
        """The scalars of `MtSgdSegment`, computed in double."""
        return self.weight_decay, self.momentum, 1 - self.dampening, -self.lr, self.clip, self.first, self.nesterov


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
    def state(self) -> tuple[Tensor, ...]:
        return self.exp_avg, self.exp_avg_sq


@dataclass(eq=False)
class SgdSegment:
    """As `AdamSegment`; `momentum`: fp32 or bf16, None for plain descent."""

    weight: Tensor
    trail: Tensor | None
    grad: Tensor
    momentum: Tensor | None
    scalars: SgdScalars

    @property
    def state(self) -> tuple[Tensor, ...]:
        return () if self.momentum is None else (self.momentum,)


Segment = AdamSegment | SgdSegment


def _kind(segment: Segment) -> tuple[int, int, int]:
    """(master, bf16 gradient, bf16 moments) as the kernel numbers them."""
    master = 0 if segment.weight.dtype == torch.float32 else 1 if segment.trail is not None else 2
    return master, int(segment.grad.dtype == torch.bfloat16), int(any(plane.dtype == torch.bfloat16 for plane in segment.state))


class HostKernel:
    """Runs fused steps with `threads` threads (the caller is one of them).

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

    def step(self, segments: Sequence[Segment], width: int | None = None) -> None:
        """One in-place step of all segments. `width` forces a narrower instruction set than the machine's (for tests)."""
        if self._library is None:
            for segment in segments:
                _step_in_torch(segment)
            return
        kinds: dict[tuple[type, tuple[int, int, int]], list[Segment]] = {}
        for segment in segments:
            if segment.weight.numel():
                kinds.setdefault((type(segment), _kind(segment)), []).append(segment)
        for (rule, (master, grad, moments)), members in kinds.items():
            layout, run = (ADAM, self._library.mt_adam) if rule is AdamSegment else (SGD, self._library.mt_sgd)
            planes = len(layout.names or ()) - 1 - len(members[0].scalars.rounded())
            rounded: dict[AdamScalars | SgdScalars, tuple[float, ...]] = {}
            rows = np.empty(len(members), layout)
            for i, s in enumerate(members):
                if s.scalars not in rounded:
                    rounded[s.scalars] = s.scalars.rounded()
                pointers = [0 if t is None else t.data_ptr() for t in (s.weight, s.trail, s.grad, *s.state)]
                rows[i] = (*pointers, *[0] * (planes - len(pointers)), s.weight.numel(), *rounded[s.scalars])
            code = run(self._threads(), rows.ctypes.data, len(rows), master, grad, moments, self.width if width is None else width)
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
    for step in (library.mt_adam, library.mt_sgd):
        step.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int]
    library.mt_read_modify_write.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    return library


def _step_in_torch(s: Segment) -> None:
    """The same step by torch's own operators, a chunk at a time, padded so that every element takes the vector's order."""
    planes = [t.view(-1) for t in (s.weight, s.grad, *s.state)]
    for at in range(0, s.weight.numel(), _FALLBACK_CHUNK):
        part = slice(at, at + _FALLBACK_CHUNK)
        count = planes[0][part].numel()
        padded = -(-count // _VECTOR) * _VECTOR
        weight, *scratch = (torch.zeros(padded) for _ in planes)
        if s.trail is not None:
            combine_(planes[0][part], s.trail.view(-1)[part], weight[:count])
        else:
            weight[:count] = planes[0][part]
        for plane, copied in zip(planes[1:], scratch, strict=True):
            copied[:count] = plane[part]
        if s.scalars.clip != 1.0:
            scratch[0].mul_(s.scalars.clip)
            scratch[0].copy_(scratch[0].to(s.grad.dtype))
        if isinstance(s, AdamSegment):
            _adam(s.scalars, weight, *scratch)
        else:
            _sgd(s.scalars, weight, *scratch)
        if s.trail is not None:
            split_(weight[:count], planes[0][part], s.trail.view(-1)[part])
        else:
            planes[0][part] = weight[:count].to(s.weight.dtype)
        for plane, copied in zip(planes[2:], scratch[1:], strict=True):
            plane[part] = copied[:count].to(plane.dtype)


def _adam(scalars: AdamScalars, weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    operator = torch._fused_adamw_ if scalars.decoupled else torch._fused_adam_
    operator(
        [weight], [grad], [exp_avg], [exp_avg_sq], [], [torch.tensor(float(scalars.step))], lr=scalars.lr, beta1=scalars.beta1, beta2=scalars.beta2,
        weight_decay=scalars.weight_decay, eps=scalars.eps, amsgrad=False, maximize=False,
    )  # fmt: skip


def _sgd(scalars: SgdScalars, weight: Tensor, grad: Tensor, momentum: Tensor | None = None) -> None:
    if scalars.weight_decay:
        grad.add_(weight, alpha=scalars.weight_decay)
    if momentum is not None:
        if scalars.first:
            momentum.copy_(grad)
        else:
            momentum.mul_(scalars.momentum).add_(grad, alpha=1 - scalars.dampening)
        grad = grad.add(momentum, alpha=scalars.momentum) if scalars.nesterov else momentum
    weight.add_(grad, alpha=-scalars.lr)
