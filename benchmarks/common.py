"""What the benchmarks share: the machine in one line, tables, results as JSON under benchmarks/results/, and a streamed stack of blocks in a plain loop."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lightning_megatrain.engine import MegaTrainEngine
from lightning_megatrain.monitor.timeline import Step, Timeline
from lightning_megatrain.policy import OffloadPolicy, StepMode

Key = TypeVar("Key")
Figure = TypeVar("Figure")
RESULTS = Path(__file__).parent / "results"


def machine() -> str:
    """Processor, cores, memory, torch."""
    model = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), platform.processor())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB, torch {torch.__version__}"


def show(title: str, columns: list[str], rows: list[list[str]]) -> None:
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    (Console() if sys.stdout.isatty() else Console(width=140)).print(table)


def save(name: str, figures: dict[str, Any], path: Path | None = None) -> None:
    """Write benchmarks/results/<name>.json, or another file, with the machine, the day and the command."""
    RESULTS.mkdir(exist_ok=True)
    script = Path(sys.argv[0]).resolve()
    own = Path(__file__).resolve().parents[1]
    command = " ".join(["python", str(script.relative_to(own) if script.is_relative_to(own) else script.name), *sys.argv[1:]])
    record = {"command": command, "date": datetime.date.today().isoformat(), "machine": machine(), **figures}
    (path or RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def turns(rounds: int, runs: Mapping[Key, Callable[[], Figure]], what: str, warmup: int = 0) -> dict[Key, list[Figure]]:
    """What each run returns, round by round: all take turns, each round beginning with another one, and the first `warmup` rounds are not counted."""
    found: dict[Key, list[Figure]] = {key: [] for key in runs}
    keys = list(runs)
    for done in range(rounds + warmup):
        at = done % len(keys)
        for key in keys[at:] + keys[:at]:
            figure = runs[key]()
            if done >= warmup:
                found[key].append(figure)
        if done >= warmup:
            print(f"{what}: round {done - warmup + 1} of {rounds}", flush=True)
    return found


class Stack(nn.Module):
    """Blocks of one class, one after the other."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Run:
    """A stack, its engine, AdamW and a plain loop.

    Args:
        model, x: what is trained, and on what.
        mode: when the host updates.
        policy: fields of `OffloadPolicy`; the stack's blocks are the units.
    """

    def __init__(self, model: Stack, x: Tensor, mode: StepMode, **policy: Any) -> None:
        self.model, self.x, self.mode = model, x, mode
        self.engine = MegaTrainEngine(model, OffloadPolicy(units=type(model.blocks[0]).__name__, **policy), torch.device("cpu"), bf16=False)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.engine.take_optimizers([self.optimizer])

    def step(self) -> float:
        """Seconds of one step."""
        start = time.perf_counter()
        self.engine.begin("train", mode=self.mode)
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start

    def recorded(self) -> Step:
        """The last complete step's pieces."""
        return Timeline.of(self.engine.recorder, [h.unit.name for h in self.engine.store], in_place=self.engine.engine.in_place).last

    def close(self) -> None:
        self.engine.settle()
        self.engine.close()
