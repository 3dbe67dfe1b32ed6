"""Train language models larger than the GPU's memory from an ordinary Lightning `Trainer`.

Importing this package registers the strategy name "megatrain":

    import lightning as L
    import lightning_megatrain as mt

    L.Trainer(strategy="megatrain", precision="bf16-true", devices=1)
    L.Trainer(strategy=mt.MegaTrainStrategy(offload=mt.OffloadPolicy(prefetch_depth=4)))
"""

from lightning_megatrain.monitor.memory import MemoryReport
from lightning_megatrain.monitor.timeline import Timeline
from lightning_megatrain.planning import TrainingPlan, plan
from lightning_megatrain.policy import OffloadPolicy
from lightning_megatrain.strategy import MegaTrainStrategy, register

__version__ = "0.1.0"
__all__ = ["MegaTrainStrategy", "MemoryReport", "OffloadPolicy", "Timeline", "TrainingPlan", "plan"]

register()
