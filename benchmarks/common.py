"""What the benchmarks share: the machine in one line, tables, and results as JSON under benchmarks/results/."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

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


def save(name: str, figures: dict[str, Any]) -> None:
    """Write benchmarks/results/<name>.json with the machine, the day and the command."""
    RESULTS.mkdir(exist_ok=True)
    command = " ".join(["python", f"benchmarks/{name}.py", *sys.argv[1:]])
    record = {"command": command, "date": datetime.date.today().isoformat(), "machine": machine(), **figures}
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
