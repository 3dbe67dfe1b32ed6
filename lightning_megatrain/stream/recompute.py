"""Which blocks run forward again in backward, and what they need to be the same the second time.

`RecomputePlan` decides call by call. Under `"auto"` the last blocks keep their activations (these live shortest), as many as spare device memory holds: in the
first pass one block of each kind is measured, and from then on a block keeps its own if those after it can, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatrain.stream.tensors import tensors_in
from lightning_megatrain.units import Site

ChangingBuffers = dict[tuple[bool, ...], set[tuple[int, str]]]
"""For each state of a module's training flags, the buffers that its forward changes: (submodule, name)."""


class RecomputePlan:
    """Which blocks recompute.

    Args:
        setting: `OffloadPolicy.recompute`.
        blocks: the sites that may, in the order of the forward pass.

    Attributes:
        room_bytes: device memory that kept activations may take; None until it is known, and nothing is kept before.
        transient_ratio: device bytes that a pass takes besides, a byte of a block's input: they leave less room for a longer batch.
    """

    def __init__(self, setting: int | str, blocks: Sequence[Site]) -> None:
        self._auto = setting == "auto"
        self._count = setting if isinstance(setting, int) else 0 if setting == "none" else len(blocks)
        self._place = {id(site.module): i for i, site in enumerate(blocks)}
        self._kinds = [type(site.module) for site in blocks]
        self._last = {kind: i for i, kind in enumerate(self._kinds)}
        self._ratios: dict[type, float] = {}
        self._after: list[float] = []
        self._kept_bytes = 0.0
        self.room_bytes: int | None = None
        self.transient_ratio = 0.0
        self.largest_input = 0
        self.kept = 0

    def begin(self) -> None:
        """A pass begins."""
        self._kept_bytes = 0.0
        self.kept = 0

    def set_room(self, room_bytes: int, transient_ratio: float) -> None:
        """What device memory leaves; see the attributes."""
        self.room_bytes, self.transient_ratio = room_bytes, transient_ratio

    @property
    def expected_bytes(self) -> int:
        """Bytes that blocks will keep in a pass as large as the largest so far."""
        if not self._auto or not self._after or self.room_bytes is None:
            return 0
        room = 0.9 * self.room_bytes - self.transient_ratio * self.largest_input
        return int(max((after * self.largest_input for after in self._after if after * self.largest_input <= room), default=0))

    def recomputes(self, site: Site, input_bytes: int, device_type: str) -> bool:
        """Whether this call of a block is to run again in backward.

        Args:
            site: any site; those that aren't blocks never do.
            input_bytes: size of its first tensor.
            device_type: where it computes.
        """
        place = self._place.get(id(site.module))
        if place is None:
            return False
        if not self._auto:
            return place < self._count
        self.largest_input = max(self.largest_input, input_bytes)
        # under autocast the low-precision copies of the weights are saved, too: the whole model would stay
        if torch.is_autocast_enabled(device_type):
            return True
        if self.room_bytes is None:
            return not self.measures(site)
        if not self._after:
            return True
        room = 0.9 * self.room_bytes - self.transient_ratio * input_bytes
        if self._kept_bytes + self._after[place] * input_bytes > room:
            return True
        self._kept_bytes += self._ratios[self._kinds[place]] * input_bytes
        self.kept += 1
        return False

    def measures(self, site: Site) -> bool:
        """Whether what a call keeps is to be measured: once for each kind of block, at its last one."""
        place = self._place.get(id(site.module))
        return self._auto and place is not None and self._kinds[place] not in self._ratios and self._last[self._kinds[place]] == place

    def note(self, site: Site, kept_bytes: int, input_bytes: int) -> None:
        """What a call kept."""
        kind = type(site.module)
        self._ratios[kind] = max(self._ratios.get(kind, 0.0), kept_bytes / max(input_bytes, 1))
        if all(other in self._ratios for other in self._kinds):
            total = 0.0
            self._after = []
            for other in reversed(self._kinds):
                total += self._ratios[other]
                self._after.insert(0, total)


class KeptBytes:
    """Sums the storages that a forward saves for backward, inputs and weights excepted."""

    def __init__(self, excepted: Sequence[Any]) -> None:
        self._seen = {t.untyped_storage().data_ptr() for t in tensors_in(*excepted) if t.layout == torch.strided}
        self.nbytes = 0

    def add(self, tensor: Tensor) -> None:
        if tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.nbytes += storage.nbytes()


class BufferReplay:
    """Buffers that a forward changes (running statistics, balance biases): the second pass gets copies of what they were before the first.

    Batch norm changes its statistics without raising their version, so such buffers are found by comparing values, once for each state of the
    training flags.
    """

    def __init__(self, module: nn.Module, changing: ChangingBuffers) -> None:
        self._owners = [m for m in module.modules() if m._buffers]
        self._changing = changing
        self._before: list[tuple[nn.Module, str, Tensor]] = []

    @contextmanager
    def pass_(self, again: bool) -> Iterator[None]:
        """Around the first (`again` False) or the second pass."""
        if not self._owners:
            yield
        elif again:
            now = [(owner, name, owner._buffers[name]) for owner, name, _ in self._before]
            try:
                for owner, name, value in self._before:
                    owner._buffers[name] = value.clone()
                yield
            finally:
                for owner, name, current in now:
                    owner._buffers[name] = current
        else:
            key = tuple(owner.training for owner in self._owners)
            known = self._changing.get(key)
            self._before = [
                (owner, name, value.clone())
                for i, owner in enumerate(self._owners)
                for name, value in owner._buffers.items()
                if value is not None and (known is None or (i, name) in known)
            ]
            yield
            if known is None:
                index = {id(owner): i for i, owner in enumerate(self._owners)}
                self._before = [(o, n, v) for o, n, v in self._before if o._buffers[n] is None or not _same(v, o._buffers[n])]
                self._changing[key] = {(index[id(o)], n) for o, n, _ in self._before}


def _same(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and a.shape == b.shape and bool(torch.equal(a, b))
