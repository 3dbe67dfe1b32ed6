"""`HostAdamW`: the fused host step as an optimizer of its own, for any training loop.

optimizer = HostAdamW(model.parameters(), lr=1e-4)          # fp32 weights: bit-equal to torch.optim.AdamW(fused=True)
optimizer = HostAdamW(model.bfloat16().parameters())        # bf16 weights with their exact fp32 master, 12 bytes a parameter
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from lightning_megatrain.host.master import combine
from lightning_megatrain.optim.kernel import AdamScalars, AdamSegment, HostKernel, Segment
from lightning_megatrain.optim.state import load_state_exactly


class HostAdamW(Optimizer):
    """AdamW on CPU tensors in one pass over memory.

    Args:
        params: fp32 or bf16 CPU tensors, or parameter groups.
        lr, betas, eps, weight_decay: as in `torch.optim.AdamW`.
        master: for bf16 weights: `"split"` keeps the 16 bits that bf16 leaves off (int16, 2 bytes a parameter), so that the master is exact
            fp32; `"none"` updates the rounded weight.
        moments: `"fp32"` or `"bf16"`.

    `state` has torch's layout: `step`, `exp_avg`, `exp_avg_sq`, and `trail` (int16) for split weights. Raises ValueError for other dtypes and devices.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        master: str = "split",
        moments: str = "fp32",
    ) -> None:
        for name, value, ok in (
            ("lr", lr, lr >= 0), ("eps", eps, eps >= 0), ("weight_decay", weight_decay, weight_decay >= 0),
            ("betas", betas, all(0 <= beta < 1 for beta in betas)), ("master", master, master in ("split", "none")),
            ("moments", moments, moments in ("fp32", "bf16")),
        ):  # fmt: skip
            if not ok:
                raise ValueError(f"HostAdamW: found {name}={value!r}, expected {_EXPECTED[name]}")
        self._kernel = HostKernel()
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "master": master, "moments": moments})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if p.device.type != "cpu" or p.dtype not in (torch.float32, torch.bfloat16) or not p.is_contiguous():
                raise ValueError(
                    f"HostAdamW: found a {p.dtype} parameter on {p.device} (contiguous: {p.is_contiguous()}), expected contiguous fp32 or bf16 on the CPU"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step; returns the closure's result."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        segments: list[Segment] = []
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    segments.append(self._segment(p, group))
        self._kernel.step(segments)
        return result

    def _segment(self, p: Tensor, group: dict[str, Any]) -> AdamSegment:
        state = self.state[p]
        if not state:
            dtype = torch.float32 if group["moments"] == "fp32" else torch.bfloat16
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p, dtype=dtype), torch.zeros_like(p, dtype=dtype)
            if group["master"] == "split" and p.dtype == torch.bfloat16:
                state["trail"] = torch.zeros_like(p, dtype=torch.int16)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        scalars = AdamScalars(float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], True, int(state["step"].item()))
        assert p.grad is not None
        return AdamSegment(p.detach(), state.get("trail"), p.grad.contiguous(), state["exp_avg"], state["exp_avg_sq"], scalars)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but moments and trail keep their dtypes, whatever the parameter's is."""
        load_state_exactly(self, state_dict, super().load_state_dict)

    def masters(self) -> list[Tensor]:
        """The exact weights, fp32 copies, in the order of the parameters."""
        found = []
        for group in self.param_groups:
            for p in group["params"]:
                trail = self.state[p].get("trail") if p in self.state else None
                found.append(p.detach().float() if trail is None else combine(p.detach(), trail))
        return found


_EXPECTED = {
    "lr": "a number of at least 0", "eps": "a number of at least 0", "weight_decay": "a number of at least 0",
    "betas": "two numbers from 0 up to, but not, 1", "master": "'split' or 'none'", "moments": "'fp32' or 'bf16'",
}  # fmt: skip
