"""`Timeline`: what each stream did in the last training steps, against the floor of the hardware.

The floor of a step is that of its two passes: max(compute, copies in) of the forward pass and max(compute, copies in, copies out) of the backward pass, and not
less than the host step (docs/design.md). Where the device is the CPU itself nothing overlaps: there the floor is the sum of compute and updates.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L

from lightning_megatrain.monitor.console import make_console
from lightning_megatrain.stream.record import Lane, Recorder

_LANES = (Lane.COMPUTE, Lane.TO_DEVICE, Lane.TO_HOST, Lane.UPDATE)


@dataclass(frozen=True)
class Piece:
    """One piece of work; times in seconds from the step's begin."""

    lane: Lane
    unit: str
    index: int
    backward: bool
    begin: float
    end: float
    nbytes: int

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Gap:
    """Time in which the device did not compute."""

    begin: float
    seconds: float
    before: str
    waited_for: str

    def __str__(self) -> str:
        return f"{self.seconds * 1000:.1f} ms before {self.before}: {self.waited_for}"


@dataclass(frozen=True)
class Step:
    """One training step.

    Attributes:
        pieces: in the order of their begin.
        seconds: from its begin to that of the next step, or to its last piece's end.
        in_place: the device is the CPU itself.
    """

    pieces: list[Piece]
    seconds: float
    in_place: bool

    def busy(self, lane: Lane, *, backward: bool | None = None) -> float:
        """Seconds of work of a lane, in one pass or both."""
        turn = self._turn
        return sum(
            p.seconds
            for p in self.pieces
            if p.lane is lane and (backward is None or backward == (p.backward or (lane is not Lane.COMPUTE and turn is not None and p.begin >= turn)))
        )

    @property
    def _turn(self) -> float | None:
        return min((p.begin for p in self.pieces if p.lane is Lane.COMPUTE and p.backward), default=None)

    @property
    def floor(self) -> float:
        """Seconds that the hardware needs at least; see the module's text."""
        update = self.busy(Lane.UPDATE)
        if self.in_place:
            return self.busy(Lane.COMPUTE) + update
        forward = max(self.busy(Lane.COMPUTE, backward=False), self.busy(Lane.TO_DEVICE, backward=False))
        backward = max(self.busy(lane, backward=True) for lane in (Lane.COMPUTE, Lane.TO_DEVICE, Lane.TO_HOST))
        return max(forward + backward, update)

    @property
    def bound(self) -> str:
        """The busiest lane."""
        return max(_LANES, key=self.busy).value

    def gaps(self, count: int = 3) -> list[Gap]:
        """The largest gaps between pieces of compute."""
        compute = [p for p in self.pieces if p.lane is Lane.COMPUTE]
        found = []
        for last, piece in pairwise(compute):
            if piece.begin > last.end:
                arrived = any(p.lane is Lane.TO_DEVICE and p.index == piece.index and last.end < p.end <= piece.begin + 1e-4 for p in self.pieces)
                left = any(p.lane is Lane.TO_HOST and last.end < p.end <= piece.begin + 1e-4 for p in self.pieces)
                why = "its weights were on their way" if arrived else "gradients were leaving" if left else "other work"
                found.append(Gap(last.end, piece.begin - last.end, f"{piece.unit} ({'backward' if piece.backward else 'forward'})", why))
        return sorted(found, key=lambda gap: -gap.seconds)[:count]

    def __str__(self) -> str:
        lanes = ", ".join(f"{lane.value} {self.busy(lane) * 1000:.0f} ms" for lane in _LANES if self.busy(lane))
        share = self.floor / max(self.seconds, 1e-9)
        head = f"step {self.seconds * 1000:.0f} ms, floor {self.floor * 1000:.0f} ms: {share:.0%} of what the hardware allows ({lanes})"
        return "\n".join([head, *(f"  gap of {gap}" for gap in self.gaps())])


class Timeline:
    """The last steps, the newest last.

    Attributes:
        steps: of those that were recorded; the last may be unfinished.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = list(steps)

    @classmethod
    def of(cls, recorder: Recorder, names: Sequence[str], *, in_place: bool) -> Timeline:
        """Read what was recorded; waits for work that is under way.

        Args:
            recorder: of a run.
            names: of units, by index.
            in_place: the device is the CPU itself.
        """
        passes = list(recorder.passes)
        begins = [mark.seconds() for mark, _ in passes]
        steps = []
        for at, (begin, (_, spans)) in enumerate(zip(begins, passes, strict=True)):
            pieces = [
                Piece(s.lane, names[s.unit] if s.unit >= 0 else "", s.unit, s.backward, s.begin.seconds() - begin, s.end.seconds() - begin, s.nbytes)
                for s in list(spans)
            ]
            pieces.sort(key=lambda piece: piece.begin)
            end = begins[at + 1] - begin if at + 1 < len(begins) else max((piece.end for piece in pieces), default=0.0)
            steps.append(Step(pieces, end, in_place))
        return cls(steps)

    @property
    def last(self) -> Step:
        """The last complete step. Raises ValueError before the first."""
        if not self.steps:
            raise ValueError("no training step was recorded yet; call timeline() during or after fit")
        return self.steps[-2] if len(self.steps) > 1 else self.steps[-1]

    def __str__(self) -> str:
        return str(self.last)

    def save_trace(self, path: str | Path) -> None:
        """Write Chrome's trace format, which ui.perfetto.dev opens."""
        events: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": at, "args": {"name": lane.value}} for at, lane in enumerate(_LANES)
        ]  # fmt: skip
        begin = 0.0
        for number, step in enumerate(self.steps):
            events.append({"name": f"step {number}", "ph": "X", "pid": 1, "tid": len(_LANES), "ts": begin * 1e6, "dur": step.seconds * 1e6})
            for p in step.pieces:
                events.append({"name": p.unit, "cat": "backward" if p.backward else "forward", "ph": "X", "pid": 1, "tid": _LANES.index(p.lane),
                               "ts": (begin + p.begin) * 1e6, "dur": p.seconds * 1e6, "args": {"bytes": p.nbytes}})  # fmt: skip
            begin += step.seconds
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def save_picture(self, path: str | Path) -> None:
        """Draw the last complete step: a lane for each stream, a colour for each unit. Needs matplotlib."""
        try:
            import matplotlib
        except ImportError:
            raise ImportError("drawing the timeline needs matplotlib: pip install matplotlib") from None
        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        step = self.last
        names = list(dict.fromkeys(p.unit for p in sorted(step.pieces, key=lambda p: p.index)))
        colours = {name: plt.get_cmap("turbo")(0.08 + 0.84 * at / max(len(names) - 1, 1)) for at, name in enumerate(names)}
        lanes = [lane for lane in _LANES if step.busy(lane)]
        figure, axes = plt.subplots(figsize=(12, 1.2 + 0.62 * len(lanes)), layout="constrained")
        for row, lane in enumerate(lanes):
            for p in step.pieces:
                if p.lane is lane:
                    axes.barh(row, p.seconds * 1000, left=p.begin * 1000, height=0.72, color=colours[p.unit], edgecolor="white", linewidth=0.4)
            axes.text(1.005, row, f"{step.busy(lane) / max(step.seconds, 1e-9):.0%} busy", va="center", transform=axes.get_yaxis_transform(), fontsize=9)
        if step._turn is not None:
            axes.axvline(step._turn * 1000, color="black", linewidth=0.8, linestyle=":")
            axes.text(step._turn * 1000, -0.62, " backward", fontsize=8, va="center")
        axes.set_yticks(range(len(lanes)), [lane.value for lane in lanes])
        axes.set_ylim(len(lanes) - 0.5, -0.8)
        axes.set_xlim(0, step.seconds * 1000)
        axes.set_xlabel("ms")
        axes.set_title(
            f"one step: {step.seconds * 1000:.0f} ms, {step.floor / max(step.seconds, 1e-9):.0%} of the floor's rate; "
            f"colours: {names[0] if names else ''} (blue) to {names[-1] if names else ''} (red)",
            fontsize=10,
        )
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        figure.savefig(path, dpi=130)
        plt.close(figure)


class TimelineWriter(L.Callback):
    """Writes `timeline.json` and, where matplotlib is installed, `timeline.png` at the end of training, and prints the last step's figures.

    Args:
        folder: where to; default: the trainer's root folder.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        timeline = getattr(trainer.strategy, "timeline", None)
        if timeline is None:
            return
        found: Timeline = timeline()
        if not found.steps:
            return
        folder = Path(self.folder or trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        found.save_trace(folder / "timeline.json")
        console = make_console()
        console.print(str(found), markup=False, highlight=False)
        try:
            found.save_picture(folder / "timeline.png")
            console.print(f"timeline: {folder / 'timeline.png'}, and timeline.json for ui.perfetto.dev", markup=False, highlight=False)
        except ImportError as error:
            console.print(f"timeline: {folder / 'timeline.json'} for ui.perfetto.dev ({error})", markup=False, highlight=False)
