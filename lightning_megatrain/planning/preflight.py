"""The plan against the machine: too little memory is refused before any is taken."""

from __future__ import annotations

from torch import nn

from lightning_megatrain.host.machine import HOST_BYTES_VARIABLE, available_host_bytes, stated_host_bytes
from lightning_megatrain.monitor.memory import human_bytes
from lightning_megatrain.planning.plan import TrainingPlan, cheaper, module_bytes


def check_host_memory(model: nn.Module, plan: TrainingPlan, optimizer: str, *, held_bytes: int = 0) -> None:
    """Raise MemoryError if the plan does not fit: need, have, and the settings that would fit.

    What the module holds already (or `held_bytes`, if that is more) counts as available, unless the environment variable states what may be used in all.
    """
    stated = stated_host_bytes()
    have = stated if stated is not None else available_host_bytes() + max(module_bytes(model), held_bytes)
    need = plan.host_bytes + plan.transient_bytes
    if need <= have:
        return
    source = f"{HOST_BYTES_VARIABLE} allows" if stated is not None else "this machine has"
    options = cheaper(model, plan, optimizer, have)
    if options:
        advice = "it fits with " + ", or with ".join(f"{text} ({human_bytes(other.host_bytes)})" for text, other in options[:2])
    else:
        advice = f"no offload setting brings it below; it needs a machine with {human_bytes(need * 1.05)} of free memory, a smaller model, or LoRA"
    raise MemoryError(f"training {plan.parameters / 1e9:.3g}B parameters in {plan.precision} needs {plan}, and {source} {human_bytes(have)}: {advice}")
