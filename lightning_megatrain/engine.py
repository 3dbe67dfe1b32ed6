"""`MegaTrainEngine`: one module's run, from taking its parameters to giving the module back.

Owns the store, the device engine, the streamer, the lander, the kernel and the worker, and puts each site's `SiteForward` in place.
Knows torch; knows nothing of Lightning, so that another loop could drive it:

    engine = MegaTrainEngine(module, policy, device, precision)
    engine.take_optimizers([optimizer])
    engine.begin("train"); loss = ...; loss.backward(); optimizer.step()
    engine.close()
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatrain.host.allocator import give_back
from lightning_megatrain.host.machine import available_host_bytes, stated_device_bytes
from lightning_megatrain.host.store import HostParameter, HostStore, HostUnit
from lightning_megatrain.monitor.memory import MemoryReport
from lightning_megatrain.optim.deferred import DeferredUpdates
from lightning_megatrain.optim.host_step import HostStep
from lightning_megatrain.optim.kernel import HostKernel
from lightning_megatrain.optim.worker import StepWorker
from lightning_megatrain.policy import OffloadPolicy, StepMode, parse_bytes
from lightning_megatrain.stream.bind import SiteForward, StreamContext, loose_copies
from lightning_megatrain.stream.compiled import is_compiled
from lightning_megatrain.stream.engines import CudaEngine, DirectEngine, EmulatedEngine, Engine, Event
from lightning_megatrain.stream.landing import GradientLander
from lightning_megatrain.stream.parking import Parking
from lightning_megatrain.stream.recompute import RecomputePlan
from lightning_megatrain.stream.record import Lane, Recorder
from lightning_megatrain.stream.streamer import LayerStreamer
from lightning_megatrain.units import Site, find_units

_log = logging.getLogger(__name__)


def make_engine(policy: OffloadPolicy, device: torch.device) -> Engine:
    """The engine that a policy asks for on a device.

    Raises ValueError where they don't go together.
    """
    choice = policy.engine
    if choice == "auto":
        choice = "direct" if device.type == "cpu" else "cuda"
    stated = stated_device_bytes()
    if choice == "cuda":
        if device.type != "cuda":
            raise ValueError(f"found device {device}, expected a CPU or a CUDA (ROCm) device; use accelerator='cpu' or 'cuda'")
        return CudaEngine(device, stated)
    if device.type != "cpu":
        raise ValueError(f"offload.engine={choice!r} needs accelerator='cpu', found device {device}; leave engine='auto' on a GPU")
    if choice == "direct":
        # half: what a later batch takes, the page cache and other processes have the rest
        return DirectEngine(lambda: (available_host_bytes() if stated is None else stated) // 2)
    return EmulatedEngine(policy.emulated_h2d_gbps, policy.emulated_d2h_gbps, policy.emulated_jitter_seconds, stated or 0)


class MegaTrainEngine:
    """Takes a module over.

    Args:
        module: CPU parameters; they stay the same objects, their data moves into the store.
        policy: all knobs.
        device: where it computes.
        bf16: weights become bf16 in the store (Lightning's bf16-true).
        previous: an earlier engine of the same module, whose store (exact masters) goes on to be used if it still holds all parameters.

    Raises ValueError for unit names that match nothing and for engines that don't go with the device.
    """

    def __init__(self, module: nn.Module, policy: OffloadPolicy, device: torch.device, *, bf16: bool, previous: MegaTrainEngine | None = None) -> None:
        self.module = module
        self.policy = policy
        self.bf16 = bf16
        self._open = ExitStack()
        units, self.sites = find_units(module, policy.units)
        self.engine = make_engine(policy, device)
        self._open.callback(self.engine.close)
        try:
            pin = device.type == "cuda" if policy.pin_memory == "auto" else bool(policy.pin_memory)
            self.store = self._take_store(units, previous, pin and device.type == "cuda")
            self._open.callback(self.store.close)
            self.kernel = HostKernel()
            self._open.callback(self.kernel.close)
            self.worker = StepWorker()
            self._open.callback(self.worker.close)
            self.recorder = Recorder()
            resident = 0 if policy.resident == "auto" else parse_bytes(policy.resident) if isinstance(policy.resident, str) else policy.resident
            self.streamer = LayerStreamer(self.engine, self.store, policy.prefetch_depth, resident, self.recorder)
            self.deferred = DeferredUpdates(
                None if self.engine.in_place else self.worker, lambda unit: [p.parameter for p in self.store.units[unit].parameters]
            )
            self.streamer.updates = self.deferred
            self._open.callback(self.deferred.flush)
            self.lander = GradientLander(self.engine, self.store, self.recorder, pin=pin and device.type == "cuda")
            self._open.callback(self.lander.close)
            self.steps: list[HostStep] = []
            self._passes = 0
            self.recompute = RecomputePlan(policy.recompute, [site for site in self.sites if site.recomputable])
            self.parking: Parking | None = None
            if policy.activations == "host" and not self.engine.in_place:
                self.parking = Parking(self.engine, pin=pin and device.type == "cuda")
                self._open.callback(self.parking.close)
            self.context = StreamContext(
                self.streamer,
                self.lander,
                self.store,
                self.recompute,
                self.recorder,
                parking=self.parking,
                rows=policy.rows_per_pass if isinstance(policy.rows_per_pass, int) else None,
                host_lookup=policy.embedding,
            )
            self._install()
        except BaseException:
            self.close()
            raise

    def _take_store(self, units: Sequence[Any], previous: MegaTrainEngine | None, pin: bool) -> HostStore:
        wanted = (self.policy.units, self.policy.master, self.policy.moments, self.bf16)
        if previous is not None and wanted == (previous.policy.units, previous.policy.master, previous.policy.moments, previous.bf16):
            store = previous.store
            if store.holds(self.module.parameters()) and [h.unit.names for h in store] == [u.names for u in units]:
                if pin:
                    store.pin()
                store.follow_writes()
                return store
        compute = torch.bfloat16 if self.bf16 else None
        split = self.bf16 and self.policy.master == "split"
        store = HostStore(units, compute_dtype=compute, split=split, moments_dtype=_DTYPES[self.policy.moments], pin=pin, kept=_beside_statistics(self.module))
        give_back()
        return store

    def _before_update(self) -> None:
        self.deferred.flush()
        self.worker.wait()

    def _after_update(self) -> None:
        self.deferred.start(self.streamer.expected)
        self.context.heap.settle(self.store.nbytes // 20)

    def settle(self) -> None:
        """Bring all weights up to date: for whoever reads them outside of a pass."""
        self.deferred.flush()

    def _share_spare_memory(self) -> None:
        """After the first training pass: what the device has left keeps activations, and what these leave keeps units."""
        allocated = self.streamer.pool.nbytes + self.lander.slab_bytes
        transient = self.engine.transient_bytes(allocated)
        spare = self.engine.spare_bytes(allocated)
        largest = self.recompute.largest_input
        self.recompute.set_room(spare + transient, transient / largest if largest else 0.0)
        if self.policy.resident == "auto":
            self.streamer.pool.resident = max(0, int(0.9 * spare) - self.recompute.expected_bytes)

    def _install(self) -> None:
        compile = self.policy.compile or is_compiled(self.module)
        for site in self.sites:
            if site.module is self.module:
                continue  # its steps are called, not its forward: see `loose_root`
            if site.loose and self.engine.in_place:
                continue
            forward = SiteForward(self.context, site, compile=compile and site.recomputable)
            forward.install()
            self._open.callback(forward.remove)
        for inner in self.module.modules():
            if getattr(inner, "gradient_checkpointing", False) is True:  # units recompute by themselves
                setattr(inner, "gradient_checkpointing", False)  # noqa: B010
                self._open.callback(setattr, inner, "gradient_checkpointing", True)
            config: Any = getattr(inner, "config", None)
            if getattr(config, "use_cache", None) is True:  # a cache would be appended to twice
                config.use_cache = False
                self._open.callback(setattr, config, "use_cache", True)

    @property
    def _root_site(self) -> Site | None:
        return next((site for site in self.sites if site.module is self.module), None)

    @contextmanager
    def loose_root(self) -> Iterator[None]:
        """The root's own parameters on the device, for the time of one of its steps."""
        root = self._root_site
        if root is None or self.engine.in_place:
            yield
        else:
            with loose_copies(self.context, root):
                yield

    # steps

    def take_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Replace the optimizers' `step` until `close`."""
        for optimizer in optimizers:
            step = HostStep(
                optimizer,
                self.store,
                self.kernel,
                fused=self.policy.host_optimizer == "auto",
                before_update=self._before_update,
                after_update=self._after_update,
                around=partial(self.recorder.host, Lane.UPDATE),
            )
            step.install()
            self._open.callback(step.remove)
            self.steps.append(step)
        if any(step.fused for step in self.steps) and not self.kernel.compiled:
            _log.warning("no compiled kernel was found: the host step runs in torch, slower; install a C++ compiler and reinstall the package")

    def begin(self, kind: str, *, mode: StepMode = StepMode.AFTER_BACKWARD, accumulate: bool = False, clip: bool = False) -> None:
        """Before a forward: `kind` is "train" or "eval".

        Args:
            mode: when the step at the end of this pass updates weights. OVERLAP_BACKWARD needs one optimizer that can step by unit.
            accumulate: gradients of several batches are added up: in fp32.
            clip: `clip_by_norm` will be asked for at the end.

        Raises RuntimeError naming a parameter that was replaced or moved since the run began.
        """
        replaced = self.store.find_replaced() or self._unbound()
        if replaced is not None:
            raise RuntimeError(
                f"parameter {replaced} was replaced or moved after the strategy had taken it over (resized, .to(), load_state_dict(assign=True)): "
                "the optimizer would go on with the old one; do this before fit, in configure_model or in setup"
            )
        if kind != "train" or not self.deferred.pending:
            self.deferred.flush()
            self.store.follow_writes()
        else:  # nobody could write in between; leftovers are read without asking
            for host in self.store:
                if not host.unit.streamed:
                    self.deferred.ensure(host.unit.index)
        self.context.open_calls.clear()
        self.streamer.begin(kind)
        if kind == "train":
            self._passes += 1
            if self._passes == 2:
                self._share_spare_memory()
            self.recompute.begin()
            self.recorder.begin()
            if self.parking is not None:
                self.parking.begin()
            self._set_gradient_dtype(accumulate)
            self.lander.begin(self._update_unit if mode is StepMode.OVERLAP_BACKWARD else None, measure=clip and not accumulate)
            for step in self.steps:
                step.defer = self._defer if mode is StepMode.OVERLAP_FORWARD and step.fused else None

    def clip_by_norm(self, optimizer: Optimizer, max_norm: float) -> bool:
        """Clip an optimizer's gradients by their norm, in the step that is to come; False if that can't be, and nothing was done."""
        step = next((step for step in self.steps if step.optimizer is optimizer), None)
        return step is not None and step.clip_by_norm(max_norm, self.lander.norm)

    def _defer(self, host: HostUnit, update: Callable[[], None]) -> None:
        self.deferred.put(host.unit.index, update)

    def _unbound(self) -> str | None:
        for site in self.sites:
            for owner, attribute, unit, position in site.slots:
                place = self.store.units[unit].parameters[position]
                if owner._parameters.get(attribute) is not place.parameter:
                    return place.name
        return None

    def _set_gradient_dtype(self, accumulate: bool) -> None:
        wanted = self.policy.grad_dtype
        fp32 = wanted == "fp32" or (wanted == "auto" and accumulate)
        for host in self.store:
            for place in host.parameters:
                dtype = torch.float32 if fp32 and place.dtype == torch.bfloat16 else place.dtype
                if place.parameter.grad_dtype != dtype:
                    held, place.parameter.grad = place.parameter.grad, None
                    place.parameter.grad_dtype = dtype
                    place.parameter.grad = None if held is None else held.to(dtype)

    def _update_unit(self, host: HostUnit, ready: list[tuple[HostParameter, Tensor]], landed: Event | None) -> None:
        (step,) = self.steps
        pairs: list[tuple[Tensor, Tensor]] = [(place.parameter, gradient) for place, gradient in ready]
        held = sum(gradient.numel() * gradient.element_size() for _, gradient in pairs)
        self.store.overlapped_bytes = max(self.store.overlapped_bytes, held)
        update = partial(_update_after, step, pairs, landed)
        if self.engine.in_place or not step.fused:
            # the device is the CPU: another thread would take its cores; and torch's own step is not run beside the user's code
            update()
        else:
            self.worker.submit(update)

    def memory_report(self) -> MemoryReport:
        """Bytes by kind, as held now."""
        self.settle()
        return MemoryReport.measure(self.store, device_slots=self.streamer.pool.nbytes, slabs=self.lander.slab_bytes, steps=self.steps)

    def on_close(self, action: Callable[[], object]) -> None:
        """Do this when the run ends, before anything of the engine's own is taken down."""
        self._open.callback(action)

    def close(self) -> None:
        """Wait for updates, end all threads, and give module and optimizers back as they were. Idempotent."""
        self._open.close()


def _update_after(step: HostStep, pairs: list[tuple[Tensor, Tensor]], landed: Event | None) -> None:
    if landed is not None:
        landed.wait()
    step.update(pairs)


def _beside_statistics(module: nn.Module) -> set[int]:
    """Ids of the weights of batch norms with running statistics: buffers keep their dtype, and torch takes bf16 inputs with both in fp32 or both in bf16."""
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase) and m.running_mean is not None]
    return {id(p) for norm in norms for p in norm.parameters(recurse=False)}


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
