import pytest
import torch

from lightning_megatrain.data import TextData


def test_the_standard_library_is_text_for_a_model():
    data = TextData(max_bytes=200_000, vocab_size=400, tokens_per_row=32)
    data.setup()
    train, held = len(data.train_dataloader().dataset), len(data.val_dataloader().dataset)
    assert 0.02 < held / (train + held) < 0.35
    batch = next(iter(data.train_dataloader()))["input_ids"]
    assert batch.shape == (16, 32)
    assert 0 <= batch.min() <= batch.max() < len(data.tokenizer) == 400
    assert data.tokenizer.decode(data.tokenizer("def f(x):\n    return é")["input_ids"]) == "def f(x):\n    return é"


def test_unigram_perplexity_by_hand(tmp_path):
    """Nine of ten tokens are the same: add-one smoothing over the vocabulary, worked out in a few lines."""
    (tmp_path / "a.txt").write_text("a b c d " * 400)
    data = TextData(path=str(tmp_path), vocab_size=270, tokens_per_row=8, validation_fraction=0.1)
    data.setup()
    counts = torch.bincount(data._train, minlength=len(data.tokenizer)).double() + 1
    rows = data._validation[: len(data._validation) // 8 * 8].view(-1, 8)[:, 1:].flatten()
    expected = torch.exp(-torch.stack([torch.log(counts[t] / counts.sum()) for t in rows]).mean())
    assert data.unigram_perplexity() == pytest.approx(expected.item())


def test_a_folder_without_text_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected 'stdlib', a file, or a folder"):
        TextData(path=str(tmp_path)).setup()


def test_too_little_text_is_said(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(ValueError, match="too few"):
        TextData(path=str(tmp_path / "a.txt"), vocab_size=300).setup()
