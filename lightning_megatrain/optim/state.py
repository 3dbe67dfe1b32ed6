"""Loading optimizer state without rounding it and without holding it twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def copy_of(parameter: Tensor, key: str, value: Tensor) -> Tensor:
    """State of its own: torch would go on with the very tensors of the saved state."""
    return value.detach().clone()


def load_state_exactly(
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    load: Callable[[dict[str, Any]], None] | None = None,
    own: Callable[[Tensor, str, Tensor], Tensor] = copy_of,
) -> None:
    """`optimizer.load_state_dict`, with every tensor of the state in its saved dtype: torch casts moments to the parameter's dtype (bf16).

    Args:
        optimizer: to load into.
        saved: its state dict.
        load: what loads hyperparameters and numbers; default: the optimizer's own `load_state_dict`.
        own: from (parameter, key, saved tensor) to the tensor that the state will hold.
    """
    numbers = {index: {key: value for key, value in values.items() if not isinstance(value, Tensor)} for index, values in saved["state"].items()}
    (load or optimizer.load_state_dict)({**saved, "state": numbers})
    order = [p for group in optimizer.param_groups for p in group["params"]]
    positions = [index for group in saved["param_groups"] for index in group["params"]]
    for p, index in zip(order, positions, strict=True):
        for key, value in saved["state"].get(index, {}).items():
            if isinstance(value, Tensor):
                optimizer.state[p][key] = own(p, key, value)
