"""What this machine has: host memory that may be used, by the tightest of its limits."""

from __future__ import annotations

import os
from pathlib import Path

HOST_BYTES_VARIABLE = "LIGHTNING_MEGATRAIN_HOST_BYTES"
DEVICE_BYTES_VARIABLE = "LIGHTNING_MEGATRAIN_DEVICE_BYTES"


def stated_host_bytes() -> int | None:
    """Host memory that may be used as the environment variable states it, or None."""
    return _stated(HOST_BYTES_VARIABLE)


def stated_device_bytes() -> int | None:
    """Device memory that may be used as the environment variable states it, or None."""
    return _stated(DEVICE_BYTES_VARIABLE)


def _stated(variable: str) -> int | None:
    stated = os.environ.get(variable)
    if stated is None:
        return None
    try:
        return int(stated)
    except ValueError:
        raise ValueError(f"{variable}: found {stated!r}, expected a whole number of bytes") from None


def available_host_bytes() -> int:
    """Bytes that can be allocated now: the system's MemAvailable or what the control group leaves, whichever is less."""
    limits = [_meminfo("MemAvailable"), _cgroup_rest()]
    known = [limit for limit in limits if limit is not None]
    if known:
        return min(known)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _meminfo(key: str) -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _cgroup_rest() -> int | None:
    """Limit less use of the control group: in a container lower than MemAvailable. The page cache counts as available."""
    for limit_file, usage_file, stat_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes", "/sys/fs/cgroup/memory/memory.stat"),
    ):
        try:
            limit = int(Path(limit_file).read_text())  # "max" where there is none
            used = int(Path(usage_file).read_text())
            cache = next((int(line.split()[1]) for line in Path(stat_file).read_text().splitlines() if line.startswith("inactive_file ")), 0)
        except (OSError, ValueError):
            continue
        return limit - used + cache
    return None
