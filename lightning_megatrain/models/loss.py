"""Cross-entropy of a large vocabulary without its logits.

`CrossEntropyHead` is a model's output layer that, given labels, returns the summed loss instead of logits. It takes the rows in chunks, so that at most
one chunk of logits exists, and computes softmax and loss in fp32. (torch's own `linear_cross_entropy` returns a bf16 sum for bf16 weights, off by a
quarter of a percent on 340 tokens, which is of no use for a reported loss.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORE = -100
_CHUNK_BYTES = 64 << 20  # of fp32 logits at a time


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of -log softmax(hidden @ weight.T + bias)[label]. Gradients are computed along with the loss: no logits for backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        rows = max(1, _CHUNK_BYTES // (4 * weight.shape[0]))
        total = hidden.new_zeros((), dtype=torch.float32)
        wanted = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if wanted[0] else None
        # chunks are added in fp32, whatever the weights are
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if wanted[1] else None
        grad_bias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device) if bias is not None and wanted[2] else None
        for at in range(0, hidden.shape[0], rows):
            part, target = hidden[at : at + rows], labels[at : at + rows]
            logits = F.linear(part, weight, bias).float()
            total += F.cross_entropy(logits, target, reduction="sum", ignore_index=IGNORE)
            if not any(wanted):
                continue
            kept = target != IGNORE
            slope = torch.softmax(logits, -1, dtype=torch.float32)
            slope.scatter_add_(1, target.clamp(min=0)[:, None], -torch.ones_like(target, dtype=torch.float32)[:, None])
            slope = (slope * kept[:, None]).to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(slope, weight, out=grad_hidden[at : at + rows])
            if grad_weight is not None:
                grad_weight += slope.t() @ part
            if grad_bias is not None:
                grad_bias += slope.sum(0, dtype=torch.float32)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = weight.dtype, bias.dtype if bias is not None else None
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            None if hidden is None else hidden * scale,
            None if weight is None else (weight * scale).to(weight_dtype),
            None if bias is None else (bias * scale).to(bias_dtype),
            None,
        )


def linear_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    """Summed cross-entropy of `hidden @ weight.T + bias`.

    Args:
        hidden: (rows, width) float.
        weight: (vocabulary, width), hidden's dtype.
        bias: (vocabulary,) or None.
        labels: (rows,) int64, -100 where a row does not count.

    Returns: () fp32.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        return _LinearCrossEntropy.apply(hidden, weight, bias, labels)  # type: ignore[no-any-return,no-untyped-call]


class CrossEntropyHead(nn.Linear):
    """An output layer that also knows the loss."""

    @classmethod
    def of(cls, linear: nn.Linear) -> CrossEntropyHead:
        """A head over the same parameters, ties included."""
        head = cls(1, 1, bias=False, device="meta")
        head.in_features, head.out_features = linear.in_features, linear.out_features
        head.weight, head.bias = linear.weight, linear.bias
        return head

    def forward(self, input: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits (..., vocabulary), or with `labels` (batch, tokens) the summed loss of `input` (batch, tokens, width): () fp32."""
        if labels is None:
            return super().forward(input)
        return linear_cross_entropy(input.reshape(-1, input.shape[-1]), self.weight, self.bias, labels.reshape(-1))
