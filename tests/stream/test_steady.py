"""What a run holds on the device: nothing new after the first steps, nothing that grows with depth, and long contexts in proportion to their tokens."""

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lightning_megatrain.host.buffer import HostBuffer
from lightning_megatrain.models import CausalLM
from lightning_megatrain.stream.engines import EmulatedEngine
from tests.conftest import LanguageModel, batches, loader, tiny_llama


@pytest.mark.parametrize("mode", ["after_backward", "overlap_backward", "overlap_forward"])
@pytest.mark.parametrize("settings", [{}, {"activations": "host", "recompute": "all"}, {"resident": "1MiB"}, {"embedding": "device", "prefetch_depth": 0}])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_nothing_is_allocated_in_the_steady_state(trainer, monkeypatch, mode, settings, accumulate):
    """Neither device memory for streamed bytes nor host buffers, counted step by step."""
    if accumulate == 2 and mode == "overlap_backward":
        return  # refused: gradients are accumulated
    made: list[int] = []
    allocate, buffer = EmulatedEngine.allocate, HostBuffer.__init__
    monkeypatch.setattr(EmulatedEngine, "allocate", lambda self, nbytes: made.append(nbytes) or allocate(self, nbytes))
    monkeypatch.setattr(HostBuffer, "__init__", lambda self, nbytes, **options: made.append(nbytes) or buffer(self, nbytes, **options))
    counts: list[int] = []

    class Counts(LanguageModel):
        def on_train_batch_end(self, *_):
            counts.append(len(made))

    module = Counts(tiny_llama(num_hidden_layers=6))
    policy = {"engine": "emulated", "optimizer_step": mode, "emulated_jitter_seconds": 0.0005} | settings
    trainer(max_steps=8 // accumulate, offload=policy, accumulate_grad_batches=accumulate).fit(module, loader(batches(8)))
    assert counts[0] > 0
    assert counts[3:] == counts[3:4] * 5


class LiveBytes(TorchDispatchMode):
    """Bytes of tensors that operations made and somebody still holds, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {leaf.untyped_storage()._cdata for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_iter(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in inputs | self._known:
                storage = leaf.untyped_storage()
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return out

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


def device_bytes(trainer, layers: int, tokens: int, activations: str = "host") -> tuple[int, int]:
    """(Peak bytes of activations, bytes of slots and slabs) of a training step."""
    config = {"model_type": "llama", "vocab_size": 256, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": layers, "num_attention_heads": 1,
              "num_key_value_heads": 1, "max_position_embeddings": tokens, "tie_word_embeddings": False}  # fmt: skip
    live = LiveBytes()

    ids = torch.randint(0, 256, (1, tokens), generator=torch.Generator().manual_seed(0))
    run = trainer(
        max_steps=1,
        limit_val_batches=0,
        offload={"engine": "emulated", "activations": activations, "recompute": "all", "emulated_h2d_gbps": 100.0, "emulated_d2h_gbps": 100.0},
    )
    with live:
        run.fit(CausalLM(config), *[loader([{"input_ids": ids}])] * 2)
    report = run.strategy.memory_report()
    return live.peak, report.device_slots_bytes + report.device_slabs_bytes


def test_a_context_of_32k_tokens_takes_device_memory_by_its_tokens_whatever_the_depth(trainer):
    shallow, copies = device_bytes(trainer, 2, 32_768)
    assert device_bytes(trainer, 4, 32_768) == (pytest.approx(shallow, rel=0.01), pytest.approx(copies, rel=0.3))  # slots for two more units, up to depth 4
    half, _ = device_bytes(trainer, 2, 16_384)
    assert shallow == pytest.approx(2 * half, rel=0.02)


def test_saved_inputs_that_stay_on_the_device_grow_with_depth(trainer):
    """Without parking the same measurement shows one input a block: 4096 tokens of 16 fp32 values."""
    shallow, deep = (device_bytes(trainer, layers, 4096, activations="device")[0] for layers in (3, 13))
    assert deep - shallow == pytest.approx(10 * 4096 * 16 * 4, rel=0.05)
