"""`TextData`: plain text in rows of equal length, with a tokenizer trained on the spot or a given one."""

from __future__ import annotations

import math
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_megatrain.models.weights import load_tokenizer

STDLIB = "stdlib"
END = "<|end|>"


class TokenRows(Dataset[dict[str, Tensor]]):
    """Consecutive rows of `length` tokens of one long sequence."""

    def __init__(self, tokens: Tensor, length: int) -> None:
        self._rows = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._rows[index]}


class TextData(L.LightningDataModule):
    """Text files as rows of tokens; every file ends with an end token, the last files are held out for validation.

    Args:
        path: `"stdlib"` (the documentation and sources of this Python's standard library), a file, or a folder of .txt, .md and .py files.
        tokenizer: a folder or hub id; None trains a byte-level BPE tokenizer on the text.
        vocab_size: of the tokenizer that is trained.
        tokens_per_row: length of a row, and with `batch_size` rows a batch.
        max_bytes: text read at most.
        validation_fraction: share of the text that is held out.

    Raises FileNotFoundError if there is no text.
    """

    def __init__(
        self,
        path: str = STDLIB,
        tokenizer: str | None = None,
        vocab_size: int = 2048,
        tokens_per_row: int = 128,
        batch_size: int = 16,
        max_bytes: int = 4_000_000,
        validation_fraction: float = 0.05,
    ) -> None:
        super().__init__()
        if not 0 < validation_fraction < 1:
            raise ValueError(f"data.validation_fraction: found {validation_fraction}, expected a number between 0 and 1")
        self.path = path
        self.tokenizer: Any = None
        self._tokenizer_source = tokenizer
        self._vocab_size = vocab_size
        self._tokens_per_row = tokens_per_row
        self.batch_size = batch_size
        self._max_bytes = max_bytes
        self._fraction = validation_fraction
        self._train: Tensor | None = None
        self._validation: Tensor | None = None

    def setup(self, stage: str | None = None) -> None:
        """Read, train the tokenizer where asked, and tokenize; once."""
        if self._train is not None:
            return
        texts = list(_texts(self.path, self._max_bytes))
        if not texts:
            raise FileNotFoundError(f"data.path: found no text under {self.path}, expected 'stdlib', a file, or a folder with .txt, .md or .py files")
        if self._tokenizer_source is not None:
            self.tokenizer = load_tokenizer(self._tokenizer_source)
        else:
            self.tokenizer = _train_tokenizer(texts, self._vocab_size)
        end = self.tokenizer.eos_token_id
        ids = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        lengths = [len(row) + 1 for row in ids]
        held, count = 0, 0
        while count < len(texts) - 1 and held < self._fraction * sum(lengths):  # the last files, whole
            count += 1
            held += lengths[-count]
        if count == 0:  # one file only: its last part
            rows = torch.tensor([*ids[0], end])
            cut = int(len(rows) * (1 - self._fraction))
            self._train, self._validation = rows[:cut], rows[cut:]
        else:
            self._train = torch.tensor([t for row in ids[:-count] for t in (*row, end)])
            self._validation = torch.tensor([t for row in ids[-count:] for t in (*row, end)])
        if len(self._validation) < self._tokens_per_row:
            raise ValueError(
                f"data: the text under {self.path} has {sum(lengths)} tokens, too few for a held-out row of {self._tokens_per_row}; "
                "give more text or set data.tokens_per_row"
            )

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        assert self._train is not None
        return DataLoader(TokenRows(self._train, self._tokens_per_row), batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        assert self._validation is not None
        return DataLoader(TokenRows(self._validation, self._tokens_per_row), batch_size=self.batch_size)

    def unigram_perplexity(self) -> float:
        """Perplexity on the held-out rows of a model that knows token frequencies only (add-one smoothing)."""
        assert self._train is not None
        assert self._validation is not None
        counts = torch.bincount(self._train, minlength=len(self.tokenizer)).double() + 1
        rows = self._validation[: len(self._validation) // self._tokens_per_row * self._tokens_per_row].view(-1, self._tokens_per_row)
        return math.exp(-float((counts / counts.sum()).log()[rows[:, 1:].flatten()].mean()))

    @property
    def sample_prompt(self) -> str:
        """A beginning to go on from."""
        return "    def" if self.path == STDLIB else "The"


def _texts(path: str, max_bytes: int) -> Iterator[str]:
    left = max_bytes
    for text in _stdlib_texts() if path == STDLIB else (f.read_text(encoding="utf-8", errors="replace") for f in _files(path)):
        text = text[:left]
        if text.strip():
            yield text
            left -= len(text)
        if left <= 0:
            return


def _stdlib_texts() -> Iterator[str]:
    """The language reference by topic, then sources, mixed by a fixed order so that what is held out is of the same kind."""
    from pydoc_data import topics

    root = Path(sysconfig.get_path("stdlib"))
    sources = [f for f in root.glob("*.py") if not f.name.startswith("_")]
    documents = [*topics.topics.values(), *(f.read_text(encoding="utf-8", errors="replace") for f in sorted(sources))]
    yield from sorted(documents, key=lambda text: zlib.crc32(text[:2000].encode()))


def _files(path: str) -> list[Path]:
    found = Path(path).expanduser()
    if found.is_dir():
        return sorted(f for f in found.rglob("*") if f.suffix in (".txt", ".md", ".py"))
    return [found] if found.is_file() else []


def _train_tokenizer(texts: list[str], vocab_size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False)
