"""torch.compile of blocks: one compilation for each class of block, used by all its instances.

Only a block's own forward is compiled. What streams it stays outside, and whoever compiles more than a block (the model, the LightningModule) gets a break in
the graph there.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            # the compiler looks at each weight's gradient, and a weight on the device is no leaf
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            return compiled(*args, **kwargs)

    return call


def compiled_forward(module: nn.Module) -> Callable[..., Any]:
    """A module's forward, compiled when it is first called."""
    if "forward" in module.__dict__:
        return _compiled(module.forward)
    return functools.partial(_compiled(type(module).forward), module)


def is_compiled(module: nn.Module) -> bool:
    """Whether the user compiled the module, a part of it, or (Lightning) its steps."""
    return getattr(module, "_compiler_ctx", None) is not None or any(
        isinstance(part, torch._dynamo.OptimizedModule) or part._compiled_call_impl is not None for part in module.modules()
    )
