"""What a GPU does with it, in one call of at most ten minutes: `python benchmarks/gpu/suite.py [--minutes 9] [--rows 4] [--tokens 4096]`.

Matmul peak and bus rates; then one training step at 1B, 3B and 7B parameters, bf16: megatrain (its time, the share of its floor, MFU), FSDP2 with CPU offload
and plain Lightning on the same model where they fit; then the deepest model of the 7B's width that host memory holds. Weights are random. Each case is a process of
its own, what one dies of is its result, and every result is on disk before the next case begins. `--tiny` runs all of it on the emulated engine of a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

SIZES = {  # hidden, intermediate, layers, heads, key-value heads, vocabulary
    "1B": (2048, 8192, 16, 32, 8, 32000),
    "3B": (3072, 8192, 28, 24, 8, 32000),
    "7B": (4096, 11008, 32, 32, 32, 32000),
    "tiny": (64, 128, 4, 4, 2, 512),
}
STEPS, WARMUP = 5, 3


def config(size: str, layers: int | None = None) -> Any:
    from transformers import LlamaConfig

    hidden, intermediate, own_layers, heads, kv_heads, vocabulary = SIZES[size]
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers or own_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=131072,
        use_cache=False,
        tie_word_embeddings=False,
    )


def build(size: str, dtype: Any, layers: int | None = None) -> Any:
    """Random weights in seconds: one block is drawn, the others are copies."""
    import torch
    from transformers import LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    fields = config(size, layers)
    with torch.device("meta"):
        model = LlamaForCausalLM(fields)
    model = model.to(dtype).to_empty(device="cpu")
    model.model.rotary_emb = LlamaRotaryEmbedding(fields)
    first, *rest = model.model.layers
    with torch.no_grad():
        for part in (first, model.model.embed_tokens, model.lm_head):
            for p in part.parameters():
                p.fill_(1.0) if p.ndim == 1 else p.normal_(0, 0.02)
        model.model.norm.weight.fill_(1.0)
        for block in rest:
            for p, source in zip(block.parameters(), first.parameters(), strict=True):
                p.copy_(source)
    return model.train()


# the cases, each in a process of its own


def device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rates(options: argparse.Namespace) -> dict[str, Any]:
    """FLOPs of a matmul, and GB/s of page-locked copies, each way and both at once."""
    import torch

    from lightning_megatrain.host.buffer import HostBuffer
    from lightning_megatrain.monitor.throughput import matmul_flops

    where = device()
    found: dict[str, Any] = {"matmul_tflops_bf16": matmul_flops(where, torch.bfloat16) / 1e12}
    if where.type != "cuda":
        return found
    nbytes = 1 << 30
    host = [HostBuffer(nbytes, pin=True) for _ in range(2)]
    near = [torch.empty(nbytes, dtype=torch.uint8, device=where) for _ in range(2)]
    far = [buffer.tensor(0, torch.uint8, (nbytes,)).zero_() for buffer in host]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def copies(inward: bool, outward: bool) -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(4):
            if inward:
                with torch.cuda.stream(streams[0]):
                    near[0].copy_(far[0], non_blocking=True)
            if outward:
                with torch.cuda.stream(streams[1]):
                    far[1].copy_(near[1], non_blocking=True)
        synchronize()
        return 4 * nbytes * (inward + outward) / (time.perf_counter() - start) / 1e9

    for name, ways in {"to_device_gbps": (True, False), "to_host_gbps": (False, True), "both_at_once_gbps": (True, True)}.items():
        found[name] = statistics.median(copies(*ways) for _ in range(3))
    for buffer in host:
        buffer.close()
    return found


def lightning_case(options: argparse.Namespace, strategy: Any, layers: int | None = None, steps: int = STEPS + WARMUP) -> dict[str, Any]:
    import lightning as L
    import torch

    from lightning_megatrain.monitor.memory import process_bytes
    from lightning_megatrain.monitor.throughput import matmul_flops, model_flops

    seconds: list[float] = []

    class Model(L.LightningModule):
        def configure_model(self) -> None:
            if not hasattr(self, "model"):
                self.model = build(options.size, torch.bfloat16, layers)
                if strategy == "auto":
                    self.model.gradient_checkpointing_enable({"use_reentrant": False})

        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-5, fused=True)

    class Timed(L.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            synchronize()
            self.start = time.perf_counter()

        def on_train_batch_end(self, *_: Any) -> None:
            synchronize()
            seconds.append(time.perf_counter() - self.start)

    vocabulary = SIZES[options.size][-1]
    batches = [torch.randint(0, vocabulary, (options.rows, options.tokens)) for _ in range(steps)]
    module = Model()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator=device().type,
        devices=1,
        precision="bf16-true",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Timed()],
    )
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    step = statistics.median(seconds[min(WARMUP, steps - 1) :])
    tokens = options.rows * options.tokens
    found: dict[str, Any] = {
        "parameters": sum(p.numel() for p in module.parameters()),
        "seconds": step,
        "tokens_per_second": tokens / step,
        "mfu": model_flops(module, tokens, options.tokens) / step / matmul_flops(device(), torch.bfloat16),
        "host_bytes": process_bytes(),
    }
    if device().type == "cuda":
        found["device_bytes"] = torch.cuda.max_memory_allocated()
    if strategy != "auto":
        timeline = trainer.strategy.timeline()  # type: ignore[attr-defined]
        found["of_floor"] = statistics.median(s.floor / s.seconds for s in timeline.steps[-STEPS - 1 : -1] or timeline.steps)
        found["bytes_a_parameter"] = trainer.strategy.memory_report().bytes_per_parameter  # type: ignore[attr-defined]
        print(timeline.steps[-2 if len(timeline.steps) > 1 else -1], file=sys.stderr)
    return found


def megatrain(options: argparse.Namespace) -> dict[str, Any]:
    import lightning_megatrain as mt

    return lightning_case(options, mt.MegaTrainStrategy(offload=_offload()))


def plain(options: argparse.Namespace) -> dict[str, Any]:
    return lightning_case(options, "auto")


def deepest(options: argparse.Namespace) -> dict[str, Any]:
    """The most layers of this width whose plan fits in 85% of the memory that is free now; two steps."""
    import torch
    from transformers import LlamaForCausalLM

    import lightning_megatrain as mt
    from lightning_megatrain.host.machine import available_host_bytes

    def host_bytes(layers: int) -> int:
        with torch.device("meta"):
            return mt.plan(LlamaForCausalLM(config(options.size, layers)), "bf16-true", offload=_offload()).host_bytes

    two, three = host_bytes(2), host_bytes(3)
    layers = 2 + int((0.85 * available_host_bytes() - two) // (three - two))
    layers = min(layers, 12) if options.size == "tiny" else layers
    return {"layers": layers} | lightning_case(options, mt.MegaTrainStrategy(offload=_offload()), layers, steps=2)


def _offload() -> dict[str, Any]:
    return {} if device().type == "cuda" else {"engine": "emulated"}


def fsdp2(options: argparse.Namespace) -> dict[str, Any]:
    """`fully_shard` a layer, CPUOffloadPolicy, bf16 compute on fp32 weights, checkpointing, torch's fused AdamW on the host."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    from lightning_megatrain.monitor.memory import process_bytes
    from lightning_megatrain.monitor.throughput import matmul_flops, model_flops

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29613", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    where = device()
    dist.init_process_group("cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo")
    model = build(options.size, torch.float32)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    count = sum(p.numel() for p in model.parameters())
    tokens = options.rows * options.tokens
    flops = model_flops(model, tokens, options.tokens)
    policies = {
        "mesh": init_device_mesh(where.type, (1,)),
        "offload_policy": CPUOffloadPolicy(pin_memory=where.type == "cuda"),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    }
    for layer in model.model.layers:
        fully_shard(layer, **policies)
    fully_shard(model, **policies)
    for name, buffer in model.model.rotary_emb.named_buffers():
        model.model.rotary_emb._buffers[name] = buffer.to(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    seconds = []
    for _ in range(STEPS + WARMUP):
        ids = torch.randint(0, SIZES[options.size][-1], (options.rows, options.tokens)).to(where)
        synchronize()
        start = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
        seconds.append(time.perf_counter() - start)
    step = statistics.median(seconds[WARMUP:])
    dist.destroy_process_group()
    found: dict[str, Any] = {"parameters": count, "seconds": step, "tokens_per_second": tokens / step, "host_bytes": process_bytes()}
    found["mfu"] = flops / step / matmul_flops(where, torch.bfloat16)
    if where.type == "cuda":
        found["device_bytes"] = torch.cuda.max_memory_allocated()
    return found


CASES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"rates": rates, "megatrain": megatrain, "plain": plain, "fsdp2": fsdp2, "deepest": deepest}


def run_case(name: str, size: str, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    command = [sys.executable, __file__, "--case", name, "--size", size, "--rows", str(options.rows), "--tokens", str(options.tokens)]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"not done in {seconds:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"error": (done.stderr.strip().splitlines() or ["ended without a word"])[-1][:300]}
    return json.loads(lines[-1]) | {"case_seconds": time.perf_counter() - start, "said": done.stderr.strip().splitlines()[-4:]}  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="no case begins when fewer than half a minute is left")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--tiny", action="store_true", help="a toy on the emulated engine: to see that the suite runs")
    parser.add_argument("--out", type=Path, help="another file than benchmarks/results/gpu.json")
    parser.add_argument("--case", choices=list(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--size", choices=list(SIZES), default="1B", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        out = os.fdopen(os.dup(1), "w")  # what libraries print must not come between
        os.dup2(2, 1)
        print(json.dumps(CASES[options.case](options)), file=out, flush=True)
        os._exit(0)
    from common import RESULTS, save, show

    if not options.tiny and device().type != "cuda":
        raise SystemExit("found no GPU; --tiny runs the suite on a CPU, to see that it runs")
    if options.tiny:
        options.rows, options.tokens = 1, 64
    sizes = ["tiny"] if options.tiny else ["1B", "3B", "7B"]
    order = [("rates", sizes[0])]
    order += [(system, size) for size in sizes for system in ("megatrain", "fsdp2", "plain")] + [("deepest", sizes[-1])]
    end = time.perf_counter() + 60 * options.minutes
    figures: dict[str, Any] = {"gpu": _name(), "rows": options.rows, "tokens": options.tokens, "cases": {}}
    for name, size in order:
        left = end - time.perf_counter()
        case = f"{name} {size}"
        figures["cases"][case] = run_case(name, size, options, left) if left > 30 else {"error": "no time was left"}
        print(f"{case}: {json.dumps(figures['cases'][case])}", flush=True)
        save("gpu", figures, options.out or RESULTS / "gpu.json")
    rows = []
    for case, found in figures["cases"].items():
        if "seconds" in found:
            memory = f"{found.get('device_bytes', 0) / 1e9:.1f} GB, {found['host_bytes'] / 1e9:.0f} GB"
            of_floor = f"{found['of_floor']:.2f}" if "of_floor" in found else ""
            rows.append(
                [
                    case,
                    f"{found['parameters'] / 1e9:.2f}B",
                    f"{found['seconds']:.2f} s",
                    f"{found['tokens_per_second']:.0f}",
                    of_floor,
                    f"{found['mfu']:.0%}",
                    memory,
                ]
            )
        else:
            rows.append(
                [case, "", found.get("error", ", ".join(f"{key} {value:.0f}" for key, value in found.items() if isinstance(value, float))), "", "", "", ""]
            )
    show(
        f"{figures['gpu']}: {options.rows} x {options.tokens} tokens a step, bf16",
        ["", "parameters", "step", "tokens/s", "of floor", "MFU", "device, host"],
        rows,
    )


def _name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


if __name__ == "__main__":
    main()
