"""What a run will take, before anything is allocated."""

from lightning_megatrain.planning.plan import TrainingPlan, plan

__all__ = ["TrainingPlan", "plan"]
