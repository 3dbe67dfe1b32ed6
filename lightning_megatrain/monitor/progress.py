"""`RunMeter`: tokens a second and resident host memory in the progress bar, and the medians at the end."""

from __future__ import annotations

import statistics
import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import Tensor

from lightning_megatrain.monitor.memory import MemoryReport, process_bytes


class RunMeter(L.Callback):
    """Measures each batch; padding does not count as tokens.

    Attributes:
        report: the strategy's memory report at the end of training, or None under another strategy.
    """

    def __init__(self) -> None:
        self.report: MemoryReport | None = None
        self._seconds: list[float] = []
        self._rates: list[float] = []
        self._start = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        seconds = time.perf_counter() - self._start
        tokens = count_tokens(batch)
        self._seconds.append(seconds)
        self._rates.append(tokens / seconds)
        pl_module.log("tokens/s", tokens / seconds, prog_bar=True, batch_size=1)
        pl_module.log("host_GiB", process_bytes() / 2**30, prog_bar=True, batch_size=1)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        report = getattr(trainer.strategy, "memory_report", None)
        self.report = report() if report is not None else None

    @property
    def median_step_seconds(self) -> float:
        """Of all batches but the first, in which memory is touched for the first time."""
        return statistics.median(self._seconds[1:] or self._seconds or [0.0])

    @property
    def tokens_per_second(self) -> float:
        return statistics.median(self._rates[1:] or self._rates or [0.0])


class RunBar(TQDMProgressBar):
    """Lightning's bar, with figures in human units."""

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, int | str | float | dict[str, float]]:
        metrics = super().get_metrics(trainer, pl_module)
        for name, pattern in (("tokens/s", "{:,.0f}"), ("host_GiB", "{:.2f}")):
            if name in metrics:
                metrics[name] = pattern.format(metrics[name])
        return metrics


def count_tokens(batch: Any) -> int:
    """Tokens of a batch without padding."""
    if isinstance(batch, dict) and isinstance(batch.get("attention_mask"), Tensor):
        return int(batch["attention_mask"].sum())
    ids = batch.get("input_ids") if isinstance(batch, dict) else batch
    return int(ids.numel()) if isinstance(ids, Tensor) else 0
