"""When the host updates weights: what `optimizer_step="auto"` chooses, and why not the other.

An update that overlaps backward leaves no gradient behind, so nothing may want all gradients at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_megatrain.optim.host_step import HostStep

_MODULE_HOOKS = (
    "backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping",
    "on_before_zero_grad", "on_after_backward", "on_before_optimizer_step",
)  # fmt: skip
_CALLBACK_HOOKS = ("on_before_zero_grad", "on_after_backward", "on_before_optimizer_step")


def accumulates(trainer: Any, module: Any) -> bool:
    """Whether gradients of several batches may be added up before a step."""
    return not module.automatic_optimization or trainer.accumulate_grad_batches != 1


def reason_against_overlap(trainer: Any, module: Any, steps: Sequence[HostStep], module_class: type, callback_class: type) -> str | None:
    """Why units may not be updated during backward in the present step, or None if they may.

    Args:
        trainer, module: Lightning's.
        steps: the run's optimizers; empty before they are made.
        module_class, callback_class: Lightning's base classes, whose hooks do nothing.
    """
    if not module.automatic_optimization:
        return "the module optimizes manually"
    if trainer.accumulate_grad_batches != 1:
        return f"gradients are accumulated over {trainer.accumulate_grad_batches} batches"
    if trainer.gradient_clip_val:
        return "gradient clipping needs all gradients"
    if getattr(trainer, "_detect_anomaly", False):
        return "anomaly detection reads gradients"
    reader = _gradient_reader(trainer, module, module_class, callback_class)
    if reader is not None:
        return f"{reader} may read gradients"
    if len(steps) > 1:
        return "there are several optimizers"
    for step in steps:
        if not step.by_unit:
            return f"{type(step.optimizer).__name__} may need all gradients"
        if step.optimizer._optimizer_step_pre_hooks or step.optimizer._optimizer_step_post_hooks:
            return "the optimizer has step hooks"
    return None


def reason_against_deferral(module: Any, steps: Sequence[HostStep]) -> str | None:
    """Why updates may not wait for the next forward, or None if they may. Who reads a weight in between waits for its update: see `WeightGuard`."""
    if not module.automatic_optimization:
        return "the module optimizes manually"
    for step in steps:
        if not step.fused:
            return f"{type(step.optimizer).__name__} runs its own step"
    return None


_AFTER_STEP = (
    "on_train_batch_end", "on_train_batch_start", "on_before_zero_grad", "on_train_epoch_end", "on_train_epoch_start",
    "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "transfer_batch_to_device", "on_after_batch_transfer",
)  # fmt: skip
# these run between steps and read no gradients
_HARMLESS = (
    "ModelCheckpoint", "LearningRateMonitor", "TQDMProgressBar", "RunBar", "RichProgressBar", "EarlyStopping", "DeviceStatsMonitor", "ThroughputMonitor",
    "Timer", "TimelineWriter", "TokenThroughput", "ModelSummary", "RichModelSummary", "GradientAccumulationScheduler", "RunMeter",
)  # fmt: skip


def clips_in_step(trainer: Any, module: Any, steps: Sequence[HostStep], module_class: type, callback_class: type) -> bool:
    """Whether the step itself may multiply gradients by the clip factor: nobody looks at them before or after. Arguments as in `reason_against_overlap`."""
    if not trainer.gradient_clip_val or trainer.gradient_clip_algorithm not in (None, "norm"):
        return False
    if (
        not all(step.fused for step in steps)
        or not module.automatic_optimization
        or _gradient_reader(trainer, module, module_class, callback_class) is not None
    ):
        return False
    looks = [_overrides(module, hook, module_class) for hook in _AFTER_STEP]
    looks += [_overrides(c, hook, callback_class) for c in trainer.callbacks if type(c).__name__ not in _HARMLESS for hook in _AFTER_STEP]
    return not any(looks)


def _gradient_reader(trainer: Any, module: Any, module_class: type, callback_class: type) -> str | None:
    """The first hook that may look at gradients between backward and the step."""
    for owner, hooks, base in ((module, _MODULE_HOOKS, module_class), *((callback, _CALLBACK_HOOKS, callback_class) for callback in trainer.callbacks)):
        for hook in hooks:
            if _overrides(owner, hook, base):
                return f"{type(owner).__name__}.{hook}"
    return None


def _overrides(instance: Any, name: str, base: type) -> bool:
    own = getattr(instance, name, None)
    return own is not None and getattr(own, "__func__", own) is not getattr(base, name, None)
