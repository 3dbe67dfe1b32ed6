"""`SweepTable`: one table (and a CSV file) at the end of a Hydra sweep."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.table import Table

from lightning_megatrain.monitor.console import make_console
from lightning_megatrain.monitor.memory import human_bytes
from lightning_megatrain.training import METRICS_FILE

_COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "step_seconds": ("step", lambda v: f"{v * 1000:.0f} ms"),
    "tokens_per_second": ("tokens/s", lambda v: f"{v:,.0f}"),
    "host_bytes_per_parameter": ("host bytes a parameter", lambda v: f"{v:.2f}"),
    "device_bytes": ("device", human_bytes),
    "val_loss": ("held-out loss", lambda v: f"{v:.4f}"),
}


class SweepTable(Callback):
    """Collects the `result.json` of each job of a sweep."""

    def __init__(self) -> None:
        self._rows: list[tuple[list[str], dict[str, float]]] = []

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        hydra = job_return.hydra_cfg
        if hydra is None or job_return.working_dir is None:
            return
        result = Path(hydra.hydra.runtime.output_dir) / METRICS_FILE
        values = json.loads(result.read_text()) if result.is_file() else {}
        self._rows.append((list(hydra.hydra.overrides.task), values))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        if not self._rows:
            return
        # what all jobs share says nothing
        shared = set.intersection(*(set(overrides) for overrides, _ in self._rows)) if len(self._rows) > 1 else set()
        named = [(", ".join(o for o in overrides if o not in shared) or "default", values) for overrides, values in self._rows]
        table = Table("setting", *(title for title, _ in _COLUMNS.values()))
        for name, values in named:
            table.add_row(name, *(show(values[key]) if key in values else "failed" for key, (_, show) in _COLUMNS.items()))
        console = make_console()
        console.print()
        console.print(table)
        path = Path(config.hydra.sweep.dir).absolute() / "sweep.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["setting", *_COLUMNS])
            writer.writerows([name, *(values.get(key, "") for key in _COLUMNS)] for name, values in named)
        console.print(f"table: {path}")
