"""`HostBuffer`: an exact number of bytes of zeroed host memory, aligned to pages.

Owns one anonymous mapping. Tensors made from it keep the mapping alive, and each has a storage of exactly its own bytes, so saving or
copying one of them never drags its neighbours along. The mapping goes when the buffer and its last tensor are gone.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence

import torch


class HostBuffer:
    """`nbytes` of zeroed memory. Never a caching allocator: those round to powers of two.

    Args:
        nbytes: size in bytes; untouched pages take no memory.
        pin: page-lock the memory in place for a GPU. Raises MemoryError where the system refuses.
    """

    def __init__(self, nbytes: int, *, pin: bool = False) -> None:
        self.nbytes = nbytes
        self._mapping = mmap.mmap(-1, max(nbytes, 1))
        if nbytes >= 2**21 and hasattr(mmap, "MADV_HUGEPAGE"):
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self._address = self.tensor(0, torch.uint8, (1,)).data_ptr()
        self._pinned = False
        self._unreferenced = sys.getrefcount(self._mapping)
        if pin:
            self._pin()

    def tensor(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """A CPU tensor of `shape` and `dtype` over the bytes from `offset` on, with a storage of its own size."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=offset).view(tuple(shape))

    @property
    def referenced(self) -> bool:
        """Whether some tensor over this memory is still alive."""
        return sys.getrefcount(self._mapping) > self._unreferenced

    @property
    def pinned(self) -> bool:
        return self._pinned

    def _pin(self) -> None:
        # In place: torch's pinned allocator would round up to a power of two.
        code = int(torch.cuda.cudart().cudaHostRegister(self._address, max(self.nbytes, 1), 0))
        if code != 0:
            raise MemoryError(
                f"page-locking {self.nbytes / 2**30:.2f} GiB of host memory failed (cudaHostRegister returned {code}); "
                "raise the limit (`ulimit -l unlimited`) or set offload.pin_memory=false"
            )
        self._pinned = True

    def close(self) -> None:
        """Unlock the pages; the memory itself goes with its last tensor. Idempotent."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._address)
            self._pinned = False
