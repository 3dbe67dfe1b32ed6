"""One training step against plain Lightning and the peers, interleaved in one run: `python benchmarks/stream.py [--rounds 7] [--layers 30]`.

Each system is a process of its own that holds its model and does one step when asked, so that all take turns on one machine in one stretch of time.
The model is SmolLM2-135M's architecture with random weights, fp32, 1 x 512 tokens, AdamW. Memory is resident memory over the process before the
model was built, a parameter, between steps, after the C library gave its free pages back (what a system holds, not what its last step left); the peak is
what the steps reached.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from common import save, show, turns

SYSTEMS = {
    "plain": "plain Lightning, no checkpointing",
    "checkpointing": "plain Lightning, gradient checkpointing",
    "megatrain": "megatrain (direct)",
    "megatrain-kept": "megatrain (direct), recompute=none",
    "megatrain-recomputed": "megatrain (direct), recompute=all",
    "megatrain-emulated": "megatrain (emulated bus, 16 GB/s)",
    "fsdp2": "FSDP2, CPU offload, checkpointing",
    "deepspeed": "DeepSpeed ZeRO-3 offload, checkpointing",
}
BASE = "checkpointing"


# the child: one system, a step a line


def build(layers: int):  # type: ignore[no-untyped-def]
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(hidden_size=576, num_hidden_layers=layers, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536, vocab_size=49152,
                    tie_word_embeddings=True, use_cache=False, max_position_embeddings=2048)
    )  # fmt: skip


def resident() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def lightning_steps(system: str, layers: int) -> Iterator[Callable[[], None]]:
    """A callback waits for the parent's word before each batch, outside of what is timed."""
    import lightning as L
    import torch

    import lightning_megatrain as mt

    class Model(L.LightningModule):
        def configure_model(self) -> None:
            if not hasattr(self, "model"):
                self.model = build(layers)
                if system == "checkpointing":
                    self.model.gradient_checkpointing_enable({"use_reentrant": False})
                self.model.train()

        def training_step(self, batch, _):  # type: ignore[no-untyped-def]
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self):  # type: ignore[no-untyped-def]
            return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)

    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):  # type: ignore[no-untyped-def]
            generator = torch.Generator().manual_seed(1)
            while True:
                yield torch.randint(0, 49152, (1, 512), generator=generator)

    class Answer(L.Callback):
        def on_train_batch_start(self, *_):  # type: ignore[no-untyped-def]
            wait_for_the_word()
            self.start = time.perf_counter()

        def on_train_batch_end(self, *_):  # type: ignore[no-untyped-def]
            answer(time.perf_counter() - self.start)

    policies = {
        "megatrain": {},
        "megatrain-kept": {"recompute": "none"},
        "megatrain-recomputed": {"recompute": "all"},
        "megatrain-emulated": {"engine": "emulated"},
    }
    strategy = mt.MegaTrainStrategy(offload=policies[system]) if system in policies else "auto"
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_steps=10**6, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                        enable_model_summary=False, callbacks=[Answer()])  # fmt: skip
    trainer.fit(Model(), torch.utils.data.DataLoader(Endless(), batch_size=None))
    return iter(())


def loop_step(system: str, layers: int) -> Callable[[], None]:
    """FSDP2 and DeepSpeed in a plain loop."""
    import torch

    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT={"fsdp2": "29611", "deepspeed": "29612"}[system], RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", DS_ACCELERATOR="cpu"
    )
    generator = torch.Generator().manual_seed(1)
    model = build(layers)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    if system == "fsdp2":
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def step() -> None:
            ids = torch.randint(0, 49152, (1, 512), generator=generator)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def zero_step() -> None:
        ids = torch.randint(0, 49152, (1, 512), generator=generator)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()

    return zero_step


_before = 0
_parameters = 0


def wait_for_the_word() -> None:
    line = sys.stdin.readline().strip()
    if line == "memory":
        with open("/proc/self/status") as file:
            peak = int(next(line for line in file if line.startswith("VmHWM")).split()[1]) * 1024
        print(json.dumps({"resident": resident() - _before, "peak": peak - _before}), file=_out, flush=True)
        line = sys.stdin.readline().strip()
    if line != "step":
        os._exit(0)


def answer(seconds: float) -> None:
    print(json.dumps({"seconds": seconds}), file=_out, flush=True)


_out = sys.stdout


def child(system: str, layers: int) -> None:
    global _before, _out
    _out = os.fdopen(os.dup(1), "w")  # what libraries print must not come between
    os.dup2(2, 1)
    import lightning  # noqa: F401
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(os.cpu_count() or 1)
    _before = resident()
    if system in ("fsdp2", "deepspeed"):
        step = loop_step(system, layers)
        while True:
            wait_for_the_word()
            start = time.perf_counter()
            step()
            answer(time.perf_counter() - start)
    lightning_steps(system, layers)


# the parent


class System:
    """A child process that does one step when asked."""

    def __init__(self, name: str, layers: int) -> None:
        self.process = subprocess.Popen([sys.executable, __file__, "--child", name, "--layers", str(layers)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True)  # fmt: skip
        self.name = name

    def ask(self, word: str) -> dict[str, float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError((self.process.communicate()[1] or "").strip().splitlines()[-1:] or "ended")
        return json.loads(line)  # type: ignore[no-any-return]

    def step(self) -> float:
        return self.ask("step")["seconds"]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=6, help="steps before those that count")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument(
        "--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS), help="all at once take 24 GiB and more: leave some out, or out of memory"
    )
    parser.add_argument("--name", default="stream", help="of the file under benchmarks/results")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.layers)
        return
    running: dict[str, System] = {}
    for name in options.systems:
        system = System(name, options.layers)
        try:
            for _ in range(options.warmup):  # the first steps allocate, and give heap pages back
                system.ask("step")
            running[name] = system
            print(f"{SYSTEMS[name]}: ready", flush=True)
        except (RuntimeError, BrokenPipeError) as error:
            print(f"{SYSTEMS[name]} is left out: {error}", flush=True)
            system.close()
    seconds = turns(options.rounds, {name: system.step for name, system in running.items()}, "one step each")
    count = parameters(options.layers)
    rows, figures = [], {}
    for name, system in running.items():
        memory = system.ask("memory")
        system.close()
        ratio = statistics.median(s / b for s, b in zip(seconds[name], seconds[BASE], strict=True)) if BASE in seconds else float("nan")
        figures[name] = {"seconds": statistics.median(seconds[name]), "times_checkpointing": ratio, "bytes_a_parameter": memory["resident"] / count,
                         "peak_bytes_a_parameter": memory["peak"] / count}  # fmt: skip
        rows.append(
            [SYSTEMS[name], f"{statistics.median(seconds[name]):.2f} s", f"{ratio:.2f}", f"{memory['resident'] / count:.1f}", f"{memory['peak'] / count:.1f}"]
        )
    show(f"one step, {count / 1e6:.1f}M parameters, 1 x 512 tokens, fp32", ["", "median", "times plain + checkpointing", "bytes a parameter", "peak"], rows)
    save(options.name, {"parameters": count, "rounds": options.rounds, "systems": figures})


def parameters(layers: int) -> int:
    """Of the tied model: embedding, per layer attention (q, o: 576 x 576; k, v: 576 x 192), MLP (3 x 576 x 1536) and two norms, and the last norm."""
    return 49152 * 576 + layers * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536 + 2 * 576) + 576


if __name__ == "__main__":
    main()
