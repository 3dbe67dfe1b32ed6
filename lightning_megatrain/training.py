"""One run from its config: data, model, trainer, and what a person wants to know at the end. Composition only."""

from __future__ import annotations

import json
import logging
import os
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from lightning_megatrain.host.machine import available_host_bytes, stated_host_bytes
from lightning_megatrain.models.weights import build_meta, model_config
from lightning_megatrain.monitor.console import make_console
from lightning_megatrain.monitor.memory import human_bytes
from lightning_megatrain.monitor.progress import RunBar, RunMeter
from lightning_megatrain.planning.plan import plan
from lightning_megatrain.policy import OffloadPolicy

METRICS_FILE = "result.json"


def train(config: DictConfig) -> dict[str, float]:
    """Run one config: train, validate, report. Returns what it measured, and writes it to `result.json` in the run's folder."""
    _quiet()
    console = make_console()
    folder = Path(HydraConfig.get().runtime.output_dir).absolute()
    L.seed_everything(config.seed, verbose=False)
    data = instantiate(config.data, _convert_="all")
    model = instantiate(config.model, _convert_="all")
    meter = RunMeter()
    callbacks: list[L.Callback] = [meter, RunBar(refresh_rate=config.progress_every)]
    callbacks += [instantiate(one, _convert_="all") for one in (config.get("callbacks") or {}).values()]
    if config.trainer.enable_checkpointing:
        every = config.checkpoint_every or max(config.trainer.max_steps, 0) or None
        callbacks.append(
            ModelCheckpoint(dirpath=folder / "checkpoints", filename="step{step}", auto_insert_metric_name=False, save_top_k=-1, every_n_train_steps=every)
        )
    strategy = instantiate(config.strategy, _convert_="all") if config.strategy is not None else "auto"
    trainer = instantiate(
        config.trainer,
        _convert_="all",
        callbacks=callbacks,
        logger=instantiate(config.logger, _convert_="all") or False,
        strategy=strategy,
        default_root_dir=folder,
    )
    before = None
    if config.validate_first:
        before = trainer.validate(model, datamodule=data, verbose=False)[0]["val_loss"]
        console.print(f"held-out loss before training: {before:.4f} a token")
    start = time.perf_counter()
    trainer.fit(model, datamodule=data, ckpt_path=config.resume)
    fit_seconds = time.perf_counter() - start
    after = trainer.validate(model, datamodule=data, verbose=False)[0]
    result = {
        "steps": float(trainer.global_step),
        "seconds": fit_seconds,
        "step_seconds": meter.median_step_seconds,
        "tokens_per_second": meter.tokens_per_second,
        "val_loss": after["val_loss"],
        "val_perplexity": after["val_perplexity"],
    }
    if before is not None:
        result["val_loss_before"] = before
    if hasattr(data, "unigram_perplexity"):
        result["unigram_perplexity"] = data.unigram_perplexity()
    if meter.report is not None:
        result["parameters"] = float(meter.report.parameters)
        result["host_bytes_per_parameter"] = meter.report.bytes_per_parameter
        result["device_bytes"] = float(meter.report.device_bytes)
    (folder / METRICS_FILE).write_text(json.dumps(result, indent=1))
    if config.sample.max_new_tokens:
        _print_sample(console, model, data, OmegaConf.to_container(config.sample))
    _print_result(console, result, folder, trainer)
    return result


def print_plan(config: DictConfig) -> None:
    """Print what the config's run will hold in memory, and whether this machine has it."""
    fields = config.model
    shape = build_meta(model_config(fields.config, fields.pretrained, fields.gguf_file))
    optimizer = {"AdamW": "adamw", "Adam": "adam", "SGD": "sgd"}.get(config.optimizer._target_.rsplit(".", 1)[-1], "adamw")
    overlap = config.trainer.gradient_clip_val is None and config.trainer.accumulate_grad_batches == 1 and config.offload.optimizer_step != "after_backward"
    predicted = plan(shape, config.trainer.precision, optimizer, OffloadPolicy.of(instantiate(config.offload, _convert_="all")), overlap=overlap)
    stated = stated_host_bytes()
    have = available_host_bytes() if stated is None else stated
    table = Table("", "", title=f"{predicted.parameters / 1e9:.2f}B parameters, {predicted.precision}", show_header=False)
    for name, value in predicted.rows():
        table.add_row(name, human_bytes(value))
    table.add_row("host memory in all", f"{human_bytes(predicted.host_bytes)} ({predicted.bytes_per_parameter:.1f} bytes a parameter)")
    table.add_row("gradients in transit", human_bytes(predicted.transient_bytes))
    table.add_row("this machine has", f"{human_bytes(have)}: {'it fits' if predicted.host_bytes + predicted.transient_bytes <= have else 'it does not fit'}")
    table.add_row("device memory for weights", f"{human_bytes(predicted.device_slots_bytes)} ({predicted.units} units, {config.offload.prefetch_depth} ahead)")
    table.add_row("device memory for gradients", human_bytes(predicted.device_slabs_bytes))
    make_console().print(table)


def _print_sample(console: Console, model: Any, data: Any, options: Any) -> None:
    prompt = data.sample_prompt
    inputs = data.tokenizer(prompt, return_tensors="pt", add_special_tokens=False, return_token_type_ids=False)
    model.eval()
    with torch.no_grad():
        ids = model.model.generate(**inputs, **options, use_cache=True, pad_token_id=data.tokenizer.pad_token_id)
    console.print(f"\n[bold]sample[/bold], after {prompt.splitlines()[-1].strip()!r}:", highlight=False)
    console.print(data.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True), markup=False, highlight=False)


def _print_result(console: Console, result: dict[str, float], folder: Path, trainer: Any) -> None:
    table = Table(show_header=False, box=None)
    if "val_loss_before" in result:
        table.add_row("held-out loss a token", f"{result['val_loss_before']:.4f} before, {result['val_loss']:.4f} after {result['steps']:.0f} steps")
    baseline = f"; {result['unigram_perplexity']:.1f} for token frequencies alone" if "unigram_perplexity" in result else ""
    table.add_row("held-out perplexity", f"{result['val_perplexity']:.2f}{baseline}")
    table.add_row("step", f"{result['step_seconds'] * 1000:.0f} ms, {result['tokens_per_second']:,.0f} tokens/s (median)")
    if "host_bytes_per_parameter" in result:
        table.add_row("host memory", f"{result['host_bytes_per_parameter']:.2f} bytes a parameter, {result['parameters'] / 1e6:.1f}M parameters")
    if result.get("device_bytes"):
        table.add_row("device memory", f"{human_bytes(result['device_bytes'])} for streamed weights and gradients")
    checkpoint = trainer.checkpoint_callback.best_model_path if trainer.checkpoint_callback is not None else ""
    if checkpoint:
        table.add_row("checkpoint", checkpoint)
    table.add_row("log", str(folder / "csv" / "metrics.csv") if (folder / "csv").is_dir() else str(folder))
    console.print()
    console.print(table)


def _quiet() -> None:
    """Lightning's and transformers' advice on things that this run decides itself."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for message in (
        ".*does not have many workers.*",
        ".*Checkpoint directory .* exists and is not empty.*",
        ".*LeafSpec.*",
        ".*GPU available but not used.*",
        ".*limit_val_batches.*",
    ):
        warnings.filterwarnings("ignore", message)
