import json

import pytest

from lightning_megatrain.data.instruct import InstructData, encode_turn

TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"


@pytest.fixture
def tokenizer(tmp_path):
    from lightning_megatrain.data.text import _train_tokenizer

    tokenizer = _train_tokenizer(["some text to train on, with numbers 1 2 3"], 300)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tokenizer


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def test_loss_is_on_the_response_and_what_ends_it(tokenizer):
    row = encode_turn(tokenizer, "two and two?", "four")
    learned = [t for t, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100]
    assert tokenizer.decode(learned) == "four<|end|>\n"
    assert tokenizer.decode(row["input_ids"]) == "<|user|>two and two?<|end|>\n<|assistant|>four<|end|>\n"


def test_rows_are_padded_masked_and_counted(tokenizer, tmp_path):
    rows = [{"prompt": "a", "response": "b" * n} for n in (1, 5, 9, 2)]
    data = InstructData(write(tmp_path / "x.jsonl", rows), str(tmp_path / "tokenizer"), batch_size=2, validation_rows=2)
    data.setup()
    batch = next(iter(data.val_dataloader()))
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape
    assert batch["attention_mask"].sum(1).tolist() == [len(row["input_ids"]) for row in data._validation]
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()


def test_long_rows_are_cut_and_empty_ones_left_out(tokenizer, tmp_path, caplog):
    rows = [{"prompt": "a", "response": "b"}, {"prompt": "a" * 200, "response": "b"}, {"prompt": "a", "response": "c"}]
    data = InstructData(write(tmp_path / "x.jsonl", rows), str(tmp_path / "tokenizer"), max_tokens=40, validation_rows=1)
    data.setup()
    assert len(data._train) == 1
    assert "1 of 2 rows were cut" in caplog.text
    assert "1 of them left out" in caplog.text


@pytest.mark.parametrize(
    ("line", "expected"),
    [("{not json", r"x\.jsonl:2: not JSON"), ('{"prompt": "a"}', r"x\.jsonl:2: found \['prompt'\].*'response'"), ("[1]", r"x\.jsonl:2: found list")],
)
def test_a_bad_row_is_named_by_file_and_line(tokenizer, tmp_path, line, expected):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n" + line)
    with pytest.raises(ValueError, match=expected):
        InstructData(str(path), str(tmp_path / "tokenizer")).setup()


def test_a_missing_file_is_named(tokenizer, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.jsonl"):
        InstructData(str(tmp_path / "nothing.jsonl"), str(tmp_path / "tokenizer")).setup()


def test_a_tokenizer_without_a_template_is_refused(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat template"):
        encode_turn(tokenizer, "a", "b")
