"""`TokenThroughput`: Lightning's ThroughputMonitor with what language models need: tokens without padding, model FLOPs, MFU against a measured rate."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from lightning.pytorch.callbacks import ThroughputMonitor
from torch import Tensor, nn

from lightning_megatrain.monitor.progress import count_tokens


class TokenThroughput(ThroughputMonitor):
    """Logs `train/device/items_per_sec` (tokens), `flops_per_sec` and `mfu`, averaged over the last batches.

    Args:
        window_size: of how many batches.

    A module's own `flops_per_batch` is used where it has one; else it is `model_flops`.
    """

    def __init__(self, window_size: int = 20) -> None:
        super().__init__(batch_size_fn=_rows, length_fn=count_tokens, window_size=window_size)
        self._sets_flops = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        dtype = torch.bfloat16 if str(trainer.precision).startswith("bf16") else torch.float32
        self.available_flops = int(matmul_flops(trainer.strategy.root_device, dtype))
        for throughput in self._throughputs.values():
            throughput.available_flops = self.available_flops
        self._sets_flops = not hasattr(pl_module, "flops_per_batch")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *rest: Any) -> None:
        if self._sets_flops:
            pl_module.flops_per_batch = model_flops(pl_module, count_tokens(batch), _sequence_length(batch))
        super().on_train_batch_end(trainer, pl_module, outputs, batch, *rest)


def model_flops(module: nn.Module, tokens: int, sequence_length: int) -> float:
    """FLOPs of one training pass over `tokens` tokens in sequences of `sequence_length`, recompute not counted.

    A matrix of n weights takes 2n a token forward, 2n for the gradient of its input, 2n for its own (Kaplan et al. 2020, section 2.1: 6PT in all). A
    frozen one takes no gradient of its own, and none of its input where nothing before it is trained. Causal attention takes 2 T d a token and layer
    forward, and twice that backward (Dao 2023: half of 4 T d). Lookups are free; of experts those count that a token uses.
    """
    trained_before = False
    flops = 0.0
    seen: set[int] = set()
    for name, p in module.named_parameters(remove_duplicate=False):
        owner = module.get_submodule(name.rpartition(".")[0])
        lookup = isinstance(owner, nn.Embedding)
        if p.ndim >= 2 and not lookup and id(p) not in seen:
            seen.add(id(p))
            backward = 2 * p.requires_grad + 2 * trained_before
            flops += (2 + backward) * p.numel() * _share_used(module, name) * tokens
        trained_before = trained_before or p.requires_grad
    config: Any = next((m.config for m in module.modules() if hasattr(getattr(m, "config", None), "num_hidden_layers")), None)
    if config is not None:
        heads = getattr(config, "num_attention_heads", 0)
        size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // max(heads, 1)
        flops += 2 * sequence_length * heads * size * config.num_hidden_layers * tokens * (3 if trained_before else 1)
    return flops


def _share_used(module: nn.Module, name: str) -> float:
    """Which part of a weight a token uses: 1, or the chosen ones of the experts."""
    if ".experts." not in f".{name}.":
        return 1.0
    for inner in module.modules():
        config = getattr(inner, "config", None)
        chosen = getattr(config, "num_experts_per_tok", None)
        count = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
        if chosen and count:
            return float(chosen / count)
    return 1.0


def matmul_flops(device: torch.device, dtype: torch.dtype, size: int | None = None) -> float:
    """FLOPs a second of a large square product on a device, the median of several."""
    size = size or (8192 if device.type == "cuda" else 1024)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        (a @ b).flatten()[0].item()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(seconds[2:])


def _ids(batch: Any) -> Any:
    return batch.get("input_ids") if isinstance(batch, dict) else batch


def _rows(batch: Any) -> int:
    ids = _ids(batch)
    return int(ids.shape[0]) if isinstance(ids, Tensor) and ids.ndim else 1


def _sequence_length(batch: Any) -> int:
    ids = _ids(batch)
    return int(ids.shape[-1]) if isinstance(ids, Tensor) and ids.ndim else 0
