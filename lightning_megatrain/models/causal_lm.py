"""`CausalLM`: trains a Hugging Face causal language model on token ids and labels.

An ordinary LightningModule: it runs under any strategy. The loss is a mean over tokens, and its logits never exist at once where the model's output
layer is a plain linear map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_megatrain.models.loss import IGNORE, CrossEntropyHead
from lightning_megatrain.models.weights import build, build_meta, model_config

MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]


class CausalLM(L.LightningModule):
    """A causal language model with its loss, optimizer and schedule.

    Args:
        config: fields of a transformers config, `model_type` among them: random weights.
        pretrained: a folder, a hub id, or `package:NAME`: those weights, and `config` is not read.
        gguf_file: name of a GGUF file in `pretrained`.
        optimizer: from parameter groups to an optimizer; default: AdamW, lr 3e-4, betas 0.9 and 0.95, weight decay 0.1. Norms and biases (parameters of
            one dimension) are never decayed.
        schedule: `"cosine"`, `"linear"` or `"constant"`, each after a linear warm-up.
        warmup_steps: optimizer steps of the warm-up.
        chunked_loss: no full logits where the model allows it.

    A batch is a dict with `input_ids` (batch, tokens) int64, and optionally `labels` (the same shape, -100 where no loss is taken; default: the ids),
    `attention_mask` and `position_ids`.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        pretrained: str | None = None,
        gguf_file: str | None = None,
        optimizer: MakeOptimizer | None = None,
        schedule: str = "cosine",
        warmup_steps: int = 0,
        chunked_loss: bool = True,
    ) -> None:
        super().__init__()
        if schedule not in ("cosine", "linear", "constant"):
            raise ValueError(f"model.schedule: found {schedule!r}, expected 'cosine', 'linear' or 'constant'")
        if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 0:
            raise ValueError(f"model.warmup_steps: found {warmup_steps!r}, expected a count of optimizer steps")
        self._schedule, self._warmup_steps, self._chunked_loss = schedule, warmup_steps, chunked_loss
        self._source = (pretrained, gguf_file)
        self.save_hyperparameters({"config": dict(config) if config else None, "pretrained": pretrained, "gguf_file": gguf_file, "schedule": schedule,
                                   "warmup_steps": warmup_steps, "chunked_loss": chunked_loss})  # fmt: skip
        self.config = model_config(config, pretrained, gguf_file)
        self.config.use_cache = False
        self._make_optimizer: MakeOptimizer = optimizer or _default_optimizer
        self.model: nn.Module | None = None
        self.val_loss = MeanMetric()
        self.train_loss = MeanMetric()

    def configure_model(self) -> None:
        """Build the model, after the strategy has said that it fits."""
        if self.model is not None:
            return
        preflight = getattr(self.trainer.strategy, "preflight", None) if self._trainer is not None else None
        if preflight is not None:
            preflight(build_meta(self.config))
        model = build(self.config, *self._source)
        model.train()
        model.config.use_cache = False  # type: ignore[union-attr]
        head = model.get_output_embeddings()  # type: ignore[operator]
        if self._chunked_loss and _plain_head(model, head):
            model.set_output_embeddings(CrossEntropyHead.of(head))  # type: ignore[operator]
        self.model = model

    def forward(self, **batch: Tensor) -> Any:
        """The model's own output, with logits (batch, tokens, vocabulary)."""
        assert self.model is not None
        return self.model(**batch)

    def loss_sum(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Summed next-token loss and the number of tokens that count, both () on the device."""
        assert self.model is not None
        inputs = {key: value for key, value in batch.items() if key in ("input_ids", "attention_mask", "position_ids")}
        labels = batch.get("labels", batch["input_ids"])
        # the label of a position is the next token; the last position has none
        shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)
        count = (shifted != IGNORE).sum()
        head = self.model.get_output_embeddings()  # type: ignore[operator]
        if isinstance(head, CrossEntropyHead):
            hidden = self.model.base_model(**inputs).last_hidden_state  # type: ignore[operator]
            return head(hidden, labels=shifted), count
        logits = self.model(**inputs).logits
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), shifted.flatten(), ignore_index=IGNORE, reduction="sum"), count

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor | None:
        """Mean loss over the batch's tokens; None where no token counts."""
        total, count = self.loss_sum(batch)
        if int(count) == 0:
            return None
        loss = total / count
        self.train_loss.update(loss.detach(), weight=count)
        self.log("loss", loss.detach(), prog_bar=True, batch_size=len(batch["input_ids"]))
        return loss

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        total, count = self.loss_sum(batch)
        if int(count):
            self.val_loss.update(total / count, weight=count)

    def on_validation_epoch_end(self) -> None:
        """`val_loss` and `val_perplexity` over all tokens, not over batches."""
        loss = self.val_loss.compute()
        self.log("val_loss", loss, prog_bar=True)
        self.log("val_perplexity", loss.exp())
        self.val_loss.reset()

    def configure_optimizers(self) -> Any:
        from transformers import get_scheduler

        trained = [p for p in self.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in trained if p.ndim > 1]},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ]
        optimizer = self._make_optimizer([group for group in groups if group["params"]])
        steps = int(self.trainer.estimated_stepping_batches) if self.trainer.max_steps != -1 or self.trainer.max_epochs != -1 else None
        name = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}[self._schedule]
        scheduler = get_scheduler(name, optimizer, num_warmup_steps=self._warmup_steps, num_training_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _default_optimizer(groups: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)


def _plain_head(model: nn.Module, head: Any) -> bool:
    """Whether the logits are the head's output and nothing else, and the loss is that of the logits and nothing else."""
    config = model.config.get_text_config()  # type: ignore[union-attr,operator]
    changes = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "logits_scale", "output_router_logits")
    return type(head) is nn.Linear and not any(getattr(config, name, None) not in (None, False, 1, 1.0) for name in changes) and hasattr(model, "base_model")
