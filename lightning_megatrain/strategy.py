"""`MegaTrainStrategy`: Lightning's hooks, translated to the engine.

Works with `lightning` and with its twin `pytorch_lightning`: the overrides are one mixin over each package's `SingleDeviceStrategy`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning_utilities.core.rank_zero as rank_zero
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from torch import Tensor, nn

from lightning_megatrain.checkpoint.files import set_aside
from lightning_megatrain.checkpoint.sharded import ShardedWeights, is_sharded, load, load_weights, refuse_other_folder, save
from lightning_megatrain.engine import MegaTrainEngine
from lightning_megatrain.monitor.memory import MemoryReport
from lightning_megatrain.monitor.timeline import Timeline
from lightning_megatrain.planning.plan import PRECISIONS, TrainingPlan, plan
from lightning_megatrain.planning.preflight import check_host_memory
from lightning_megatrain.policy import OffloadPolicy, StepMode
from lightning_megatrain.step_mode import accumulates, clips_in_step, reason_against_deferral, reason_against_overlap

_log = logging.getLogger(__name__)
NAME = "megatrain"
_LINES = {
    StepMode.AFTER_BACKWARD: "updates after backward",
    StepMode.OVERLAP_BACKWARD: "updates overlap backward",
    StepMode.OVERLAP_FORWARD: "updates overlap the next forward",
}


if TYPE_CHECKING:
    _Base = SingleDeviceStrategy
else:
    _Base = object  # the twin package has a base class of its own


class _MegaTrain(_Base):
    """The overrides, in the order in which the trainer calls them."""

    strategy_name = NAME
    _package = "lightning.pytorch"

    def __init__(
        self,
        offload: OffloadPolicy | Mapping[str, Any] | None = None,
        *,
        state_dict_type: str = "full",
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        if state_dict_type not in ("full", "sharded"):
            raise ValueError(f"state_dict_type: found {state_dict_type!r}, expected 'full' or 'sharded'")
        self.offload = OffloadPolicy.of(offload)
        _refuse_unfinished(self.offload)
        self.state_dict_type = state_dict_type
        self._engine: MegaTrainEngine | None = None
        self._said: str | None = None
        self._clips_in_step = False
        self._exact: Mapping[str, Any] | None = None
        self._parallel_devices: list[torch.device] = []
        super().__init__(device="cpu", accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)  # type: ignore[call-arg]

    # what the accelerator connector sets

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The devices that the trainer was given; one."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        devices = list(devices or [])
        if len(devices) > 1:
            raise ValueError(f"strategy='{NAME}' trains on one device, found {len(devices)}; set Trainer(devices=1)")
        self._parallel_devices = devices
        if devices:
            self._root_device = devices[0]

    @property
    def precision_plugin(self) -> Any:
        return super().precision_plugin  # type: ignore[misc]

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is not None:
            _refuse_precision(_asked_precision() or plugin.precision)
        super(_MegaTrain, type(self)).precision_plugin.fset(self, plugin)  # type: ignore[attr-defined]

    # set up

    def setup(self, trainer: Any) -> None:
        """Take the module over: preflight, host store, streams, and the host's step in place of the optimizers'."""
        fitting = trainer.state.fn == "fit"
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        precision = self.precision_plugin.precision
        if precision != "bf16-true":  # that plugin would round the weights before the store has their exact values
            self.model = self.precision_plugin.convert_module(self.model)
        module = self._module
        overlap = fitting and self._step_mode(trainer, module, []) is StepMode.OVERLAP_BACKWARD
        self._check_memory(module, precision, "none", overlap)
        previous, self._engine = self._engine, None
        self._engine = MegaTrainEngine(module, self.offload, self.root_device, bf16=precision == "bf16-true", previous=previous)
        self._restore_masters()
        self.model_to_device()
        if fitting:
            self.setup_optimizers(trainer)
            self._check_memory(module, precision, _optimizer_kind(self.optimizers), overlap)
            self._engine.take_optimizers([o for o in self.optimizers if isinstance(o, torch.optim.Optimizer)])
            self._step_mode(trainer, module, self._engine.steps)
            hook = module.register_state_dict_pre_hook(lambda *_: self._running.settle())
            self._engine.on_close(hook.remove)
            self._take_clipping(self._engine)
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Parameters stay on the CPU; buffers and modules without parameters (metrics) move."""
        device = self.root_device
        for module in self._module.modules():
            if any(base.__name__ == "_DeviceDtypeModuleMixin" for base in type(module).__mro__):
                # what Lightning's own `.to` would set, which would also move the parameters
                setattr(module, "_device", device)  # noqa: B010
                if self.precision_plugin.precision == "bf16-true":
                    setattr(module, "_dtype", torch.bfloat16)  # noqa: B010
            if device.type != "cpu":
                for name, buffer in module._buffers.items():
                    module._buffers[name] = None if buffer is None else buffer.to(device)
                if not any(True for _ in module.parameters()) and hasattr(module, "_defaults"):  # torchmetrics
                    module.to(device)

    def plan(self, module: nn.Module, precision: str, *, optimizer: str = "adamw", overlap: bool | None = None) -> TrainingPlan:
        """What training this module under this strategy will hold."""
        return plan(module, precision, optimizer, self.offload, overlap=overlap)

    def preflight(self, module: nn.Module, *, optimizer: str = "adamw") -> None:
        """Raise MemoryError if a module, also one on the meta device, will not fit. For `configure_model`, before real weights are made."""
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        overlap = self._step_mode(trainer, self.lightning_module, []) is StepMode.OVERLAP_BACKWARD if trainer is not None else None
        self._check_memory(module, self.precision_plugin.precision, optimizer, overlap)

    def _check_memory(self, module: nn.Module, precision: str, optimizer: str, overlap: bool | None) -> None:
        held = self._engine.store.nbytes if self._engine is not None else 0  # of an earlier fit: it goes on to be used, or goes
        check_host_memory(module, self.plan(module, precision, optimizer=optimizer, overlap=overlap), optimizer, held_bytes=held)

    def _step_mode(self, trainer: Any, module: Any, steps: Any) -> StepMode:
        """When weights are updated in the present step; says so when that changes."""
        wanted = self.offload.optimizer_step
        package = importlib.import_module(self._package)
        told = (trainer, module, steps, package.LightningModule, package.Callback)
        self._clips_in_step = bool(steps) and clips_in_step(*told)
        mode, against = StepMode.AFTER_BACKWARD, ""
        if wanted in ("auto", StepMode.OVERLAP_BACKWARD.value):
            against = reason_against_overlap(*told) or ""
            mode = StepMode.AFTER_BACKWARD if against else StepMode.OVERLAP_BACKWARD
        if against and wanted == StepMode.OVERLAP_BACKWARD.value:
            raise ValueError(
                f"offload.optimizer_step='overlap_backward' leaves no gradient behind, but {against}; set offload.optimizer_step=auto or after_backward"
            )
        # where the device is the CPU itself there is nothing that the next forward could hide an update behind
        if wanted == StepMode.OVERLAP_FORWARD.value or (against and not (self._engine is None or self._engine.engine.in_place)):
            no_deferral = reason_against_deferral(module, steps)
            mode, against = (StepMode.OVERLAP_FORWARD, against) if no_deferral is None else (mode, no_deferral)
        line = f"{_LINES[mode]}: {against}" if against else _LINES[mode]
        if steps and line != self._said:
            self._said = line
            _log.info(f"megatrain: {line}")
        return mode

    def _take_clipping(self, engine: MegaTrainEngine) -> None:
        """Where nobody looks at gradients, the step multiplies them by the clip factor: a pass over host memory less."""
        plugin = self.precision_plugin
        plain = plugin.clip_grad_by_norm
        if getattr(type(plugin).clip_grad_by_norm, "__qualname__", "") != "Precision.clip_grad_by_norm" or "clip_grad_by_norm" in plugin.__dict__:
            return  # the user's own

        def clip_grad_by_norm(optimizer: Any, clip_val: float) -> None:
            if not (self._clips_in_step and engine.clip_by_norm(optimizer, float(clip_val))):
                plain(optimizer, clip_val)

        plugin.clip_grad_by_norm = clip_grad_by_norm
        engine.on_close(lambda: plugin.__dict__.pop("clip_grad_by_norm", None))

    # steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        engine, module = self._running, self._module
        mode = self._step_mode(module.trainer, module, engine.steps)
        engine.begin("train", mode=mode, accumulate=accumulates(module.trainer, module), clip=self._clips_in_step)
        with engine.loose_root():
            return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._running.begin("eval")
        with self._running.loose_root():
            return super().validation_step(*args, **kwargs)  # type: ignore[misc]

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self._running.begin("eval")
        with self._running.loose_root():
            return super().test_step(*args, **kwargs)  # type: ignore[misc]

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._running.begin("eval")
        with self._running.loose_root():
            return super().predict_step(*args, **kwargs)  # type: ignore[misc]

    @property
    def _module(self) -> Any:
        return self.lightning_module

    @property
    def _running(self) -> MegaTrainEngine:
        if self._engine is None:
            raise RuntimeError("the strategy holds no module yet; call this during or after fit, validate, test or predict")
        return self._engine

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        self._running.settle()  # units that this forward did not need
        return super().backward(*args, **kwargs)

    # checkpoints

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        self._running.settle()
        return super().optimizer_state(optimizer)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state; in one file with exact fp32 masters where weights are split, so that it resumes to the bit."""
        if self._engine is not None:
            self._engine.settle()
        state: dict[str, Any] = super().lightning_module_state_dict()
        if self._engine is not None and self.state_dict_type == "full":
            for name, value in state.items():
                place = self._engine.store.find_weight(value) if isinstance(value, Tensor) else None
                if place is not None and place.trail is not None:
                    state[name] = place.master()
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """One file, or a folder of safetensors files (`state_dict_type="sharded"`)."""
        path = Path(filepath)
        refuse_other_folder(path)
        if self.state_dict_type == "full":
            with set_aside(path) if is_sharded(path) else nullcontext():
                super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None or "://" in str(filepath):
            raise ValueError(
                f"sharded checkpoints are folders on this machine's disks, found {filepath} (storage_options={storage_options!r}); use state_dict_type='full'"
            )
        parameters = [[p for group in optimizer.param_groups for p in group["params"]] for optimizer in self.optimizers]
        save(path, checkpoint, self._running.store, parameters)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Either kind, whatever `state_dict_type` is."""
        if "://" not in str(checkpoint_path) and is_sharded(Path(checkpoint_path)):
            return load(Path(checkpoint_path), weights_only=weights_only is not False)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Weights into the module; their exact values are kept for `setup` where the module's dtype would round them."""
        weights = checkpoint["state_dict"]
        rounded = any(p.dtype == torch.bfloat16 for p in self._module.parameters())
        self._exact = weights if rounded else None
        if isinstance(weights, ShardedWeights):
            load_weights(self._module, weights, strict=strict)
        else:
            super().load_model_state_dict(checkpoint, strict=strict)

    def _restore_masters(self) -> None:
        """Exact masters from the checkpoint that was loaded before the store was made."""
        exact, self._exact = self._exact, None
        if exact is None:
            return
        store = self._running.store
        for host in store:
            for place in host.parameters:
                value = exact[place.name] if place.trail is not None and place.name in exact else None
                if value is not None and value.dtype == torch.float32:
                    place.write_master(value)
            store.note_written(host)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Optimizer state stays on the host, in its own dtype, and goes straight into the store."""
        for step, state in zip(self._running.steps, checkpoint["optimizer_states"], strict=True):
            step.load_state(state)

    # measured

    def master_state_dict(self) -> dict[str, Tensor]:
        """Exact weights by parameter name: fp32 copies on the CPU, also under bf16-true."""
        self._running.settle()
        self._running.store.follow_writes()
        return self._running.store.masters()

    def memory_report(self) -> MemoryReport:
        """Bytes by kind as measured."""
        return self._running.memory_report()

    def timeline(self) -> Timeline:
        """What the device, the bus and the host step did in the last training steps; also after fit."""
        engine = self._running
        engine.settle()
        return Timeline.of(engine.recorder, [host.unit.name for host in engine.store], in_place=engine.engine.in_place)

    def teardown(self) -> None:
        """Give the module back as an ordinary CPU module; the store stays, for `master_state_dict` and a next fit."""
        try:
            if self._engine is not None:
                self._engine.close()
        finally:
            super().teardown()


class MegaTrainStrategy(_MegaTrain, SingleDeviceStrategy):
    """Trains models larger than the device: parameters, gradients and optimizer state in host memory, layers streamed.

    Args:
        offload: an `OffloadPolicy`, a dict of its fields, or None for defaults that suit most runs.
        state_dict_type: `"full"`: one file, interchangeable with `strategy="auto"`; `"sharded"`: a folder of safetensors files, written a unit at a time.
            Either kind is loaded whatever this is.
        accelerator, checkpoint_io, precision_plugin: as in Lightning's strategies.

    Raises TypeError or ValueError for unknown or wrong settings, when it is made.
    """


def twin_strategy() -> type | None:
    """The same strategy for `pytorch_lightning`, or None if that package is not installed."""
    if importlib.util.find_spec("pytorch_lightning") is None:
        return None
    package = importlib.import_module("pytorch_lightning.strategies")
    body = {"__doc__": MegaTrainStrategy.__doc__, "_package": "pytorch_lightning", "__module__": __name__}
    return type("TwinMegaTrainStrategy", (_MegaTrain, package.SingleDeviceStrategy), body)


def register() -> None:
    """Make `strategy="megatrain"` known to both packages."""
    StrategyRegistry.register(NAME, MegaTrainStrategy, description="parameters in host memory, streamed through one device", override=True)
    log = getattr(rank_zero, "log", None)
    twin = twin_strategy()
    if log is not None:
        rank_zero.log = log  # importing the twin points Lightning's shared logger at itself
    if twin is not None:
        registry = importlib.import_module("pytorch_lightning.strategies").StrategyRegistry
        registry.register(NAME, twin, description="parameters in host memory, streamed through one device", override=True)


def _refuse_precision(precision: Any) -> None:
    if precision not in PRECISIONS:
        raise ValueError(
            f"strategy='{NAME}' does not train in precision={str(precision)!r}: fp16 needs loss scaling and 8-bit weights have no exact master; "
            "use 'bf16-true' (exact fp32 master), 'bf16-mixed' or '32-true'"
        )


def _asked_precision() -> str | None:
    """The precision that the user asked the trainer for.

    On a CPU Lightning (2.6) silently turns '16-mixed' into 'bf16-mixed' before the strategy hears of it; the connector that calls the setter still has
    the user's word among its arguments.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "__init__" and "_precision_flag" in getattr(frame.f_locals.get("self"), "__dict__", {}):
            asked = frame.f_locals.get("precision")
            return {"16": "16-mixed", 16: "16-mixed"}.get(asked, asked) if asked in ("16", 16, "16-mixed") else None
        frame = frame.f_back
    return None


def _optimizer_kind(optimizers: list[Any]) -> str:
    """What the plan counts: the largest state among the optimizers."""
    kinds = {"SGD": "sgd", "RMSprop": "sgd", "Adagrad": "sgd", "Adafactor": "none", "_MockOptimizer": "none"}
    found = [kinds.get(type(optimizer).__name__, "adamw") for optimizer in optimizers]
    return max(found, key=("none", "sgd", "adamw").index, default="none")


def _refuse_unfinished(policy: OffloadPolicy) -> None:
    """Settings that the design names and this version does not have yet."""
    asked = {"storage": policy.storage != "ram"}
    for name, wanted in asked.items():
        if wanted:
            raise ValueError(f"{name} is not in this version yet; leave it at its default (see CHANGELOG.md)")


__all__ = ["MegaTrainStrategy", "register", "twin_strategy"]
