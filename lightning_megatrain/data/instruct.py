"""`InstructData`: prompts and responses from JSON lines, in the tokenizer's chat template, with loss on the response only."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatrain.models.loss import IGNORE
from lightning_megatrain.models.weights import load_tokenizer

_log = logging.getLogger(__name__)


class InstructData(L.LightningDataModule):
    """Supervised fine-tuning rows.

    Args:
        path: JSON lines with a prompt and a response in each.
        validation_path: the same, held out; None holds out `validation_rows` rows from the end of `path`.
        tokenizer: a folder, a hub id or `package:NAME`.
        gguf_file: name of a GGUF file in it.
        prompt_key, response_key: fields of a row.
        max_tokens: longer rows are cut; how many is logged.
        batch_size: rows a batch, padded on the right to the longest.
        validation_rows: rows that are used for validation.

    Raises FileNotFoundError for a missing file and ValueError, with file and line, for a row that can't be used.
    """

    def __init__(
        self,
        path: str,
        tokenizer: str,
        validation_path: str | None = None,
        gguf_file: str | None = None,
        prompt_key: str = "prompt",
        response_key: str = "response",
        max_tokens: int = 2048,
        batch_size: int = 4,
        validation_rows: int = 256,
    ) -> None:
        super().__init__()
        self.path, self.validation_path = path, validation_path
        self._source, self._gguf_file = tokenizer, gguf_file
        self._prompt_key, self._response_key = prompt_key, response_key
        self._max_tokens, self.batch_size, self._validation_rows = max_tokens, batch_size, validation_rows
        self.tokenizer: Any = None
        self._train: list[dict[str, list[int]]] | None = None
        self._validation: list[dict[str, list[int]]] = []

    def setup(self, stage: str | None = None) -> None:
        """Read and tokenize; once."""
        if self._train is not None:
            return
        self.tokenizer = load_tokenizer(self._source, self._gguf_file)
        rows = list(_read(self.path, self._prompt_key, self._response_key))
        if self.validation_path is not None:
            held = list(_read(self.validation_path, self._prompt_key, self._response_key))[: self._validation_rows]
        else:
            if len(rows) <= self._validation_rows:
                raise ValueError(
                    f"data: {self.path} has {len(rows)} rows, no more than data.validation_rows={self._validation_rows}; set fewer or give data.validation_path"
                )
            rows, held = rows[: -self._validation_rows], rows[-self._validation_rows :]
        self._train = self._encode(rows, self.path)
        self._validation = self._encode(held, self.validation_path or self.path)

    def _encode(self, rows: Sequence[tuple[str, str]], path: str) -> list[dict[str, list[int]]]:
        encoded, cut, empty = [], 0, 0
        for prompt, response in rows:
            row = encode_turn(self.tokenizer, prompt, response)
            if len(row["input_ids"]) > self._max_tokens:
                cut += 1
                row = {key: value[: self._max_tokens] for key, value in row.items()}
            if all(label == IGNORE for label in row["labels"][1:]):
                empty += 1  # nothing of the response is left to learn from
                continue
            encoded.append(row)
        if cut or empty:
            _log.warning(
                f"{path}: {cut} of {len(rows)} rows were cut to data.max_tokens={self._max_tokens} tokens, {empty} of them left out since no response was left"
            )
        if not encoded:
            raise ValueError(f"data: no row of {path} can be used; see data.max_tokens, data.prompt_key and data.response_key")
        return encoded

    def train_dataloader(self) -> DataLoader[Any]:
        assert self._train is not None
        return DataLoader(self._train, batch_size=self.batch_size, shuffle=True, collate_fn=self.collate)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._validation, batch_size=self.batch_size, collate_fn=self.collate)  # type: ignore[arg-type]

    def collate(self, rows: Sequence[Mapping[str, list[int]]]) -> dict[str, Tensor]:
        """Rows padded on the right: `input_ids`, `labels`, `attention_mask`, each (batch, tokens) int64."""
        length = max(len(row["input_ids"]) for row in rows)

        def padded(key: str, fill: int) -> Tensor:
            return torch.tensor([[*row[key], *[fill] * (length - len(row[key]))] for row in rows])

        mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (length - len(row["input_ids"])) for row in rows])
        return {"input_ids": padded("input_ids", self.tokenizer.pad_token_id), "labels": padded("labels", IGNORE), "attention_mask": mask}

    @property
    def sample_prompt(self) -> str:
        """A held-out prompt in the chat template, up to where the response begins."""
        row = self._validation[0]
        start = next(i for i, label in enumerate(row["labels"]) if label != IGNORE)
        return str(self.tokenizer.decode(row["input_ids"][:start]))


def encode_turn(tokenizer: Any, prompt: str, response: str) -> dict[str, list[int]]:
    """One prompt and its response in the chat template.

    Returns `input_ids`, and `labels`: -100 but for the response as the template writes it, the token that ends it and what follows included.
    Raises ValueError if there is no chat template, or if it begins a conversation otherwise than the prompt alone.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("the tokenizer has no chat template, which data=instruct needs; use an instruction-tuned model, or data=text")
    user = {"role": "user", "content": prompt}
    before = tokenizer.apply_chat_template([user], add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template([user, {"role": "assistant", "content": response}], tokenize=False)
    if not whole.startswith(before):
        raise ValueError("the chat template writes a prompt differently when a response follows; it needs generation markers, which this version does not read")
    prefix = tokenizer(before, add_special_tokens=False)["input_ids"]
    rest = tokenizer(whole[len(before) :], add_special_tokens=False)["input_ids"]
    return {"input_ids": prefix + rest, "labels": [IGNORE] * len(prefix) + rest}


def _read(path: str, prompt_key: str, response_key: str) -> Iterator[tuple[str, str]]:
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"data.path: found no file {file.absolute()}, expected JSON lines with {prompt_key!r} and {response_key!r}")
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{file}:{number}: not JSON: {error}") from None
            missing = [key for key in (prompt_key, response_key) if not isinstance(row, dict) or not isinstance(row.get(key), str)]
            if missing:
                keys = sorted(row) if isinstance(row, dict) else type(row).__name__
                raise ValueError(
                    f"{file}:{number}: found {keys}, expected a text under {' and '.join(map(repr, missing))}; set data.prompt_key and data.response_key"
                )
            yield row[prompt_key], row[response_key]
