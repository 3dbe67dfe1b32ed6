"""On a device: the numbers of plain Lightning there, within rounding, in a fraction of its memory."""

import copy

import pytest
import torch

from tests.conftest import LanguageModel, Squares, batches, loader, stack, tiny_llama

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"), pytest.mark.filterwarnings("ignore")]


def fit(trainer, model, data, **options):
    torch.manual_seed(5)
    module = LanguageModel(copy.deepcopy(model))
    trainer(accelerator="cuda", max_steps=len(data), **options).fit(module, loader(data))
    return module


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("step", ["overlap_backward", "after_backward"])
@pytest.mark.parametrize("recompute", ["all", "none"])
@pytest.mark.parametrize("tied", [False, True])
def test_it_trains_like_plain_lightning(trainer, precision, step, recompute, tied):
    torch.backends.cuda.matmul.allow_tf32 = False
    model = tiny_llama(num_hidden_layers=6, tie_word_embeddings=tied)
    ours = fit(trainer, model, batches(4), precision=precision, offload={"optimizer_step": step, "recompute": recompute})
    plain = fit(trainer, model, batches(4), precision=precision, strategy="auto")
    tolerance = 1e-4 if precision == "32-true" else 2e-2
    assert ours.losses == pytest.approx(plain.losses, rel=tolerance)
    assert all(p.device.type == "cpu" for p in ours.parameters())


def test_repeated_runs_have_the_same_bits(trainer):
    """A race would show as a difference between runs."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    runs = [fit(trainer, tiny_llama(num_hidden_layers=8), batches(6), precision="bf16-true").losses for _ in range(3)]
    torch.use_deterministic_algorithms(False)
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("options", [{"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}])
def test_clipping_and_accumulation(trainer, options):
    ours = fit(trainer, tiny_llama(), batches(6), **options)
    plain = fit(trainer, tiny_llama(), batches(6), strategy="auto", **options)
    assert ours.losses == pytest.approx(plain.losses, rel=1e-4)


def test_device_memory_does_not_grow_with_depth(trainer):
    peaks = []
    for depth in (8, 32):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        module = Squares(stack(depth, 1024))
        trainer(accelerator="cuda", max_steps=2).fit(module, loader([torch.randn(2, 1024)] * 2))
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < 1.1 * peaks[0]


def test_host_memory_is_page_locked(trainer):
    run = trainer(accelerator="cuda", max_steps=1)
    seen = []
    module = Squares(stack(2, 256))
    module.on_train_batch_start = lambda *_: seen.append(all(p.is_pinned() for p in module.parameters()))
    run.fit(module, loader([torch.randn(2, 256)]))
    assert seen == [True]
