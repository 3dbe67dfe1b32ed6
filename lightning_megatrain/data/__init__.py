"""Data for causal language models: plain text, and prompts with responses."""

from lightning_megatrain.data.instruct import InstructData
from lightning_megatrain.data.text import TextData

__all__ = ["InstructData", "TextData"]
