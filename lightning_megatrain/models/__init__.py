"""LightningModules around Hugging Face models. They are ordinary modules: nothing in them knows that weights stream."""

from lightning_megatrain.models.causal_lm import CausalLM

__all__ = ["CausalLM"]
