"""Loading optimizer state without rounding it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def load_state_exactly(optimizer: Optimizer, saved: Mapping[str, Any], load: Callable[[dict[str, Any]], None] | None = None) -> None:
    """`optimizer.load_state_dict`, with every tensor of the state in its saved dtype: torch would cast moments to the parameter's dtype (bf16)."""
    (load or optimizer.load_state_dict)(dict(saved))
    order = [p for group in optimizer.param_groups for p in group["params"]]
    positions = [index for group in saved["param_groups"] for index in group["params"]]
    for p, index in zip(order, positions, strict=True):
        for name, value in saved["state"].get(index, {}).items():
            if isinstance(value, Tensor):  # a copy: torch would go on with the very tensors of the saved state
                optimizer.state[p][name] = value.detach().clone()
