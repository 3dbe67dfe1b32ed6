"""`HostBuffer`: an exact number of bytes of zeroed host memory, aligned to pages.

Owns one anonymous mapping. Tensors made from it keep the mapping alive, and each has a storage of exactly its own bytes, so saving or
copying one of them never drags its neighbours along. The mapping goes when the buffer and its last tensor are gone.
"""

from __future__ import annotations

import enum
import math
import mmap
import sys
from collections.abc import Sequence
from typing import Any

import torch

_LANE_BYTES = 6 * 64


class Lane(enum.IntEnum):
    """The planes that one update reads along with each other.

    Each starts a few cache lines later in its buffer: planes that march at equal offsets from a page's start collide in the caches and the memory's
    banks (a fused fp32 step then runs at 0.6 of the memory's rate, not at 1.0).
    """

    WEIGHTS = 0
    TRAIL = 1
    EXP_AVG = 2
    EXP_AVG_SQ = 3
    GRADIENTS = 4


class HostBuffer:
    """`nbytes` of zeroed memory. Never a caching allocator: those round to powers of two.

    Args:
        nbytes: size in bytes; untouched pages take no memory.
        lane: which plane it holds.
        pin: page-lock the memory in place for a GPU. Raises MemoryError where the system refuses.
    """

    def __init__(self, nbytes: int, *, lane: Lane = Lane.WEIGHTS, pin: bool = False) -> None:
        self.nbytes = nbytes
        self._start = lane * _LANE_BYTES
        self._mapping = mmap.mmap(-1, max(self._start + nbytes, 1))
        if nbytes >= 2**21 and hasattr(mmap, "MADV_HUGEPAGE"):
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self._address = torch.frombuffer(self._mapping, dtype=torch.uint8, count=1).data_ptr()
        self._pinned = False
        self._unreferenced = sys.getrefcount(self._mapping)
        if pin:
            self.pin()

    def tensor(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """A CPU tensor of `shape` and `dtype` over the bytes from `offset` on, with a storage of its own size."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=self._start + offset).view(tuple(shape))

    @property
    def referenced(self) -> bool:
        """Whether some tensor over this memory is still alive."""
        return sys.getrefcount(self._mapping) > self._unreferenced

    @property
    def pinned(self) -> bool:
        return self._pinned

    def pin(self) -> None:
        """Page-lock the memory where it is. Idempotent."""
        if self._pinned:
            return
        # In place: torch's pinned allocator would round up to a power of two.
        code = int(_cudart().cudaHostRegister(self._address, max(self._start + self.nbytes, 1), 0))
        if code != 0:
            raise MemoryError(
                f"page-locking {self.nbytes / 2**30:.2f} GiB of host memory failed (cudaHostRegister returned {code}); "
                "raise the limit (`ulimit -l unlimited`) or set offload.pin_memory=false"
            )
        self._pinned = True

    def close(self) -> None:
        """Unlock the pages; the memory itself goes with its last tensor. Idempotent."""
        if self._pinned:
            _cudart().cudaHostUnregister(self._address)
            self._pinned = False


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
