"""The host's optimizers: fused kernels, the drop-in `HostAdamW`, and the step that replaces the user's optimizer's."""

from lightning_megatrain.optim.adamw import HostAdamW

__all__ = ["HostAdamW"]
