import pytest
import torch

from lightning_megatrain.monitor.memory import human_bytes, process_bytes
from lightning_megatrain.monitor.progress import count_tokens


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * 2**30, "5.0 GiB"), (3 * 2**40, "3.0 TiB")])
def test_bytes_for_people(count, text):
    assert human_bytes(count) == text


def test_resident_memory_grows_with_what_is_touched():
    before = process_bytes()
    block = torch.ones(50_000_000)
    assert process_bytes() - before >= 150_000_000
    del block


def test_padding_is_not_counted():
    batch = {"input_ids": torch.zeros(2, 5, dtype=torch.long), "attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])}
    assert count_tokens(batch) == 8
    assert count_tokens({"input_ids": torch.zeros(2, 5)}) == 10
    assert count_tokens(torch.zeros(2, 3)) == 6
    assert count_tokens([1]) == 0


def test_the_bar_writes_figures_for_people():
    from types import SimpleNamespace

    from lightning_megatrain.monitor.progress import RunBar

    trainer = SimpleNamespace(progress_bar_metrics={"loss": 1.25, "tokens/s": 4000.2, "host_GiB": 0.5249}, loggers=[])
    assert RunBar().get_metrics(trainer, None) == {"loss": 1.25, "tokens/s": "4,000", "host_GiB": "0.52"}
