"""`HostStep`: the user's optimizer, stepping in host memory.

The user's optimizer object stays the truth: hyperparameters are read from its `param_groups` at each step, its `state` holds views of the store in
torch's own layout. AdamW, Adam and SGD run in the fused kernel; every other optimizer runs its own `step`, on exact fp32 masters where weights are split.
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
from lightning_megatrain.optim.kernel import AdamScalars, AdamSegment, HostKernel, Segment, SgdScalars, SgdSegment
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
        self._moments = _MOMENTS.get(type(optimizer), ())
        self.fused = fused and bool(self._moments) and not any(_unusual(group) for group in optimizer.param_groups)
        self._clip = 1.0
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

    @torch.no_grad()
    def clip_by_norm(self, max_norm: float, norm: Callable[[Tensor], Tensor]) -> bool:
        """`torch.nn.utils.clip_grad_norm_`, but the coming step multiplies, in its own pass over the gradients; these stay as they are.

        Args:
            max_norm: of all gradients together.
            norm: L2 norm of a parameter's gradient.

        Returns False, and does nothing, if this optimizer's gradients are not all of one kind that the kernel reads.
        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        kinds = {(p.grad.dtype, p.grad.device.type, p.grad.layout) for p in parameters if p.grad is not None}
        if not self.fused or len(kinds) != 1 or (torch.strided not in (kind[2] for kind in kinds)):
            return False
        total = torch.linalg.vector_norm(torch.stack([norm(p) for p in parameters]))
        self._clip = float(torch.clamp(max_norm / (total + 1e-6), max=1.0))
        return True

    def _into_store(self, parameter: Tensor, key: str, value: Tensor) -> Tensor:
        if self.fused and key in self._moments and self._store.find(parameter) is not None:
            return self._store.moment(parameter, self._moments.index(key)).copy_(value)
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
        self._clip = 1.0
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
            for _, gradient, _ in rest if self._clip != 1.0 else ():
                gradient.mul_(self._clip)
            self._step_alone(rest)
        if self.defer is not None and segments and len(touched) == 1 and not rest:
            (host,) = touched.values()
            self.defer(host, partial(self._run, segments, [host]))
        else:
            self._run(segments, list(touched.values()))

    def _run(self, segments: list[Segment], touched: list[HostUnit]) -> None:
        with self._around(touched[0].unit.index if touched else -1):
            self._kernel.step(segments)
        for host in touched:
            self._store.note_written(host)

    def _group_of(self, pairs: Iterable[Pair]) -> dict[int, dict[str, Any]]:
        counted = sum(len(group["params"]) for group in self.optimizer.param_groups)
        if counted != self._counted or not all(id(p) in self._groups for p, _ in pairs):
            self._groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
            self._counted = counted
        return self._groups

    def _segment(self, parameter: Tensor, gradient: Tensor, place: HostParameter | None, group: dict[str, Any]) -> Segment:
        state = self.optimizer.state[parameter]
        weight, trail = parameter.detach(), place.trail if place is not None else None
        lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
        if isinstance(self.optimizer, torch.optim.SGD):
            sgd = SgdScalars(
                lr=lr, momentum=float(group["momentum"]), dampening=float(group["dampening"]), weight_decay=weight_decay, nesterov=bool(group["nesterov"]),
                first=state.get("momentum_buffer") is None, clip=self._clip,
            )  # fmt: skip
            return SgdSegment(weight, trail, gradient.contiguous(), self._moment(parameter, place, 0) if sgd.momentum else None, sgd)
        exp_avg, exp_avg_sq = self._moment(parameter, place, 0), self._moment(parameter, place, 1)
        state["step"] = state.get("step", torch.zeros((), dtype=torch.float32)) + 1
        beta1, beta2 = group["betas"]
        adam = AdamScalars(
            lr=lr, beta1=float(beta1), beta2=float(beta2), eps=float(group["eps"]), weight_decay=weight_decay,
            decoupled=bool(group.get("decoupled_weight_decay", isinstance(self.optimizer, torch.optim.AdamW))), step=int(state["step"].item()), clip=self._clip,
        )  # fmt: skip
        return AdamSegment(weight, trail, gradient.contiguous(), exp_avg, exp_avg_sq, adam)

    def _moment(self, parameter: Tensor, place: HostParameter | None, which: int) -> Tensor:
        """One of the optimizer's moments, in the store: zeros at the first step, and what was loaded from a checkpoint moves in."""
        state, key = self.optimizer.state[parameter], self._moments[which]
        held = state.get(key)
        own: Tensor = self._store.moment(parameter, which) if place is not None else torch.zeros_like(parameter) if held is None else held
        if held is None:
            own.zero_()
        elif held.data_ptr() != own.data_ptr():
            own.copy_(held)
        state[key] = own
        return own

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


_MOMENTS: dict[type, tuple[str, ...]] = {
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    torch.optim.Adam: ("exp_avg", "exp_avg_sq"),
    torch.optim.SGD: ("momentum_buffer",),
}
"""The fused optimizers, with the names of their moments in torch's state."""


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
