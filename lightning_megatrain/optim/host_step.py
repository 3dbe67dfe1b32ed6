"""`HostStep`: the user's optimizer, stepping in host memory.

The user's optimizer object stays the truth: hyperparameters are read from its `param_groups` at each step, its `state` holds views of the store in
torch's own layout. AdamW and Adam run in the fused kernel; every other optimizer runs its own `step`, on exact fp32 masters where weights are split.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatrain.host.store import HostParameter, HostStore, HostUnit
from lightning_megatrain.optim.kernel import AdamScalars, AdamSegment, HostKernel
from lightning_megatrain.optim.state import copy_of, load_state_exactly

Pair = tuple[Tensor, Tensor]
"""A parameter and its gradient, both on the CPU."""


class HostStep:
    """Replaces one optimizer's `step` for the length of a run.

    Args:
        optimizer: the user's.
        store: where its parameters live.
        kernel: the fused kernel.
        fused: False makes every optimizer run its own step.
        before_update: called after the closure and before weights change: waits for overlapped updates.
        after_update: called at the end of each step.
        around: entered with a unit's index while its weights are updated.

    Raises ValueError for LBFGS on split masters: it evaluates its closure many times a step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        store: HostStore,
        kernel: HostKernel,
        *,
        fused: bool,
        before_update: Callable[[], None],
        after_update: Callable[[], None] | None = None,
        around: Callable[[int], AbstractContextManager[None]] = lambda unit: nullcontext(),
    ) -> None:
        self.optimizer = optimizer
        self._store = store
        self._kernel = kernel
        self._around = around
        self._before_update = before_update
        self._after_update = after_update or (lambda: None)
        self.defer: Callable[[HostUnit, Callable[[], None]], None] | None = None
        """Set for steps whose updates wait for the next forward: takes a unit and its update. Only the fused optimizers' updates can wait."""
        self.fused = fused and type(optimizer) in (torch.optim.AdamW, torch.optim.Adam) and not any(_unusual(group) for group in optimizer.param_groups)
        self._split = any(place.trail is not None for host in store for place in host.parameters)
        if self._split and isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("LBFGS evaluates its closure many times a step, which the split bf16 master does not allow; use precision='32-true'")
        self._groups: dict[int, dict[str, Any]] = {}
        self._counted = -1
        self._replaced: Any = optimizer.__dict__.get("step")
        self._plain_step: Callable[..., Any] = optimizer.step

    @property
    def by_unit(self) -> bool:
        """Whether units may be updated one by one: the fused optimizers, and torch's own that treat each parameter alone."""
        return self.fused or (type(self.optimizer).__module__.startswith("torch.optim") and not isinstance(self.optimizer, torch.optim.LBFGS))

    def install(self) -> None:
        """Make `optimizer.step` this step, hooks and schedulers' bookkeeping included."""

        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            optimizer._opt_called = True  # type: ignore[attr-defined]
            result = self._step(closure)
            self._after_update()
            return result

        hooked = Optimizer.profile_hook_step(step)  # type: ignore[arg-type]
        hooked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self.optimizer.step = types.MethodType(hooked, self.optimizer)  # type: ignore[method-assign]

    def remove(self) -> None:
        """Give the optimizer its own step back. Idempotent."""
        if self._replaced is None:
            self.optimizer.__dict__.pop("step", None)
        else:
            self.optimizer.step = self._replaced  # type: ignore[method-assign]

    def load_state(self, saved: dict[str, Any]) -> None:
        """Load the optimizer's state dict; moments go straight into the store."""
        load_state_exactly(self.optimizer, saved, own=self._into_store)

    def _into_store(self, parameter: Tensor, key: str, value: Tensor) -> Tensor:
        if self.fused and key in ("exp_avg", "exp_avg_sq") and self._store.find(parameter) is not None:
            return self._store.moments(parameter)[key == "exp_avg_sq"].copy_(value)
        return copy_of(parameter, key, value)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        if not self.fused and not self._split:
            result = _own_step(self.optimizer, None if closure is None else self._then_wait(closure))
            for host in self._store:
                self._store.note_written(host)
            return result
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._before_update()
        pairs = [(p, p.grad) for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self.by_unit:
            ordered = sorted(pairs, key=self._unit_index)
            for _, members in groupby(ordered, key=self._unit_index):
                self.update(list(members))
        else:
            self.update(pairs)
        return result

    def _then_wait(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            result = closure()
            self._before_update()
            return result

        return run

    def _unit_index(self, pair: Pair) -> int:
        return self._store.unit_of(pair[0]).unit.index if self._store.find(pair[0]) is not None else -1

    @torch.no_grad()
    def update(self, pairs: Sequence[Pair]) -> None:
        """Step these parameters; their gradients are on the host."""
        mine = self._group_of(pairs)
        segments, rest = [], []
        touched: dict[int, HostUnit] = {}
        for parameter, gradient in pairs:
            group = mine.get(id(parameter))
            if group is None:
                continue
            place = self._store.find(parameter)
            if place is not None:
                touched[id(self._store.unit_of(parameter))] = self._store.unit_of(parameter)
            if self.fused and _kernel_takes(parameter, gradient, place, self._store.plain_bf16):
                segments.append(self._segment(parameter, gradient, place, group))
            else:
                rest.append((parameter, gradient, place))
        if rest:
            self._step_alone(rest)
        if self.defer is not None and segments and len(touched) == 1 and not rest:
            (host,) = touched.values()
            self.defer(host, partial(self._run, segments, [host]))
        else:
            self._run(segments, list(touched.values()))

    def _run(self, segments: list[AdamSegment], touched: list[HostUnit]) -> None:
        with self._around(touched[0].unit.index if touched else -1):
            self._kernel.adam(segments)
        for host in touched:
            self._store.note_written(host)

    def _group_of(self, pairs: Iterable[Pair]) -> dict[int, dict[str, Any]]:
        counted = sum(len(group["params"]) for group in self.optimizer.param_groups)
        if counted != self._counted or not all(id(p) in self._groups for p, _ in pairs):
            self._groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
            self._counted = counted
        return self._groups

    def _segment(self, parameter: Tensor, gradient: Tensor, place: HostParameter | None, group: dict[str, Any]) -> AdamSegment:
        state = self.optimizer.state[parameter]
        if place is not None:
            exp_avg, exp_avg_sq = self._store.moments(parameter)
        else:
            exp_avg, exp_avg_sq = state.get("exp_avg", torch.zeros_like(parameter)), state.get("exp_avg_sq", torch.zeros_like(parameter))
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            exp_avg.zero_()
            exp_avg_sq.zero_()
        elif state["exp_avg"].data_ptr() != exp_avg.data_ptr():  # loaded from a checkpoint: it moves into the store
            exp_avg.copy_(state["exp_avg"])
            exp_avg_sq.copy_(state["exp_avg_sq"])
        state["exp_avg"], state["exp_avg_sq"] = exp_avg, exp_avg_sq
        state["step"] += 1
        beta1, beta2 = group["betas"]
        scalars = AdamScalars(
            lr=float(group["lr"]), beta1=float(beta1), beta2=float(beta2), eps=float(group["eps"]), weight_decay=float(group["weight_decay"]),
            decoupled=bool(group.get("decoupled_weight_decay", isinstance(self.optimizer, torch.optim.AdamW))), step=int(state["step"].item()),
        )  # fmt: skip
        trail = place.trail if place is not None else None
        return AdamSegment(parameter.detach(), trail, gradient.contiguous(), exp_avg, exp_avg_sq, scalars)

    def _step_alone(self, members: Sequence[tuple[Tensor, Tensor, HostParameter | None]]) -> None:
        """The optimizer's own step on these parameters only, on their exact masters."""
        chosen = {id(p) for p, _, _ in members}
        groups = [(group, group["params"]) for group in self.optimizer.param_groups]
        kept = [p.grad for p, _, _ in members]
        try:
            for group, params in groups:
                group["params"] = [p for p in params if id(p) in chosen]
            for p, gradient, place in members:
                p.grad = None
                if place is not None and place.trail is not None:
                    p.data = place.master()
                    gradient = gradient.float()
                p.grad = gradient
            _own_step(self.optimizer, None)
        finally:
            for group, params in groups:
                group["params"] = params
            for (p, _, place), held in zip(members, kept, strict=True):
                p.grad = None
                if place is not None and place.trail is not None:
                    place.write_master(p.data)
                    p.data = place.weight
                p.grad = held


def _own_step(optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
    """The class's own step, without its hooks: `HostStep` runs those once."""
    step = type(optimizer).step
    plain = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    return plain(optimizer, closure) if closure is not None else plain(optimizer)


def _unusual(group: dict[str, Any]) -> bool:
    return any(bool(group.get(flag)) for flag in ("amsgrad", "maximize", "capturable", "differentiable"))


def _kernel_takes(parameter: Tensor, gradient: Tensor, place: HostParameter | None, plain_bf16: bool) -> bool:
    if gradient.layout != torch.strided or gradient.dtype not in (torch.float32, torch.bfloat16) or not parameter.is_contiguous():
        return False
    return parameter.dtype == torch.float32 or (place is not None and (place.trail is not None or (plain_bf16 and parameter.dtype == torch.bfloat16)))
