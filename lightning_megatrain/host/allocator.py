"""Giving back what the C library keeps of freed memory.

glibc raises its threshold for mapping large blocks with each one that is freed, keeps such blocks in its heaps from then on, and fragments them:
5 to 8 bytes a parameter after a model was converted or a step was taken. Where there is another C library this does nothing.
"""

from __future__ import annotations

import ctypes
import functools


class _MallInfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None)
        library.mallinfo2.restype = _MallInfo2
        library.malloc_trim.argtypes = [ctypes.c_size_t]
    except (OSError, AttributeError):
        return None
    return library


def free_bytes() -> int:
    """Bytes that the C library keeps for later use, resident or given back already; 0 where that can't be known."""
    library = _glibc()
    return int(library.mallinfo2().fordblks) if library is not None else 0


def give_back(above_bytes: int = 0) -> bool:
    """Return free heap pages to the system if the C library keeps more than `above_bytes`; whether it was asked to. Cheap where nothing is resident."""
    library = _glibc()
    if library is None or free_bytes() <= above_bytes:
        return False
    library.malloc_trim(0)
    return True


class HeapWatch:
    """Returns what is no working memory: holes beyond twice what activations took, which the next step will take again.

    A heap that is trimmed after every step maps its activations anew each time (8% of a step of 134M parameters, at times a third), which holes between
    them, about half as large again, brought about where activations alone were left; one that is never trimmed grows by the holes of other passes.
    """

    def __init__(self) -> None:
        self._peak = 0

    def note(self) -> None:
        """The heap holds a pass's activations now."""
        library = _glibc()
        if library is not None:
            self._peak = max(self._peak, int(library.mallinfo2().uordblks))

    def settle(self, allowance_bytes: int) -> bool:
        """After a step: give back if more is free than twice what activations took and `allowance_bytes`; whether that was so."""
        library = _glibc()
        if library is None:
            return False
        activations = max(0, self._peak - int(library.mallinfo2().uordblks))
        self._peak = 0
        return give_back(above_bytes=2 * activations + allowance_bytes)
