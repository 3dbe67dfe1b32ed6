import copy

import pytest
import torch
from torch.nn import functional as F

from lightning_megatrain.models import CausalLM
from lightning_megatrain.models.weights import resolve
from tests.conftest import loader

CONFIG = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "tie_word_embeddings": True}  # fmt: skip


def rows(count=4):
    generator = torch.Generator().manual_seed(1)
    found = []
    for i in range(count):
        ids = torch.randint(0, 64, (2, 12), generator=generator)
        labels = ids.clone()
        labels[:, : 3 + i] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def built(**options):
    torch.manual_seed(0)
    module = CausalLM(config=CONFIG, **options)
    module.configure_model()
    return module


@pytest.mark.parametrize("chunked", [True, False])
def test_the_loss_is_the_mean_over_tokens(chunked):
    module = built(chunked_loss=chunked)
    batch = rows(1)[0]
    total, count = module.loss_sum(batch)
    logits = module.model(input_ids=batch["input_ids"]).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
    assert int(count) == 18  # 2 rows of 12 tokens, the first 3 of each masked, each label one token on
    torch.testing.assert_close(total / count, expected)


@pytest.mark.parametrize("offload", [{}, {"engine": "emulated"}], ids=["direct", "emulated"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_it_trains_like_under_plain_lightning(trainer, offload, precision):
    ends = []
    for options in ({"offload": offload}, {"strategy": "auto"}):
        module = built(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True), warmup_steps=1)
        trainer(max_steps=4, precision=precision, **options).fit(module, loader(rows()), loader(rows(2)))
        ends.append(copy.deepcopy(module.state_dict()))
    assert all(torch.equal(ends[0][name], value) for name, value in ends[1].items())


def test_validation_is_weighted_by_tokens(trainer):
    module = built()
    data = rows(4)
    seen = trainer(max_steps=1).validate(module, loader(data), verbose=False)[0]
    with torch.no_grad():
        sums = [module.loss_sum(batch) for batch in data]
    expected = sum(float(total) for total, _ in sums) / sum(int(count) for _, count in sums)
    assert seen["val_loss"] == pytest.approx(expected, rel=1e-6)
    assert seen["val_perplexity"] == pytest.approx(torch.tensor(expected).exp().item(), rel=1e-5)


def test_norms_and_biases_are_not_decayed_and_the_rate_warms_up(trainer):
    rates = []
    module = built(warmup_steps=2, schedule="cosine", optimizer=lambda p: torch.optim.AdamW(p, lr=1.0, weight_decay=0.1))
    module.on_before_optimizer_step = lambda o: rates.append(o.param_groups[0]["lr"])
    run = trainer(max_steps=4)
    run.fit(module, loader(rows()), loader(rows(1)))
    groups = run.optimizers[0].param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all(p.ndim == 1 for p in groups[1]["params"])
    assert rates == pytest.approx([0.0, 0.5, 1.0, 0.5])


def test_a_batch_without_labels_is_skipped(trainer):
    module = built()
    empty = rows(1)[0]
    empty["labels"] = torch.full_like(empty["labels"], -100)
    before = copy.deepcopy(module.state_dict())
    trainer(max_epochs=1).fit(module, loader([empty]), loader(rows(1)))
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_models_whose_logits_are_more_than_a_linear_map_keep_their_own_head():
    module = CausalLM(config={"model_type": "gemma2", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                              "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0})  # fmt: skip
    module.configure_model()
    assert type(module.model.get_output_embeddings()) is torch.nn.Linear


def test_it_loads_again_without_the_strategy(trainer, tmp_path):
    module = built()
    run = trainer(max_steps=2)
    run.fit(module, loader(rows()), loader(rows(1)))
    run.save_checkpoint(tmp_path / "x.ckpt")
    again = CausalLM.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in module.state_dict().items())


@pytest.mark.parametrize(("options", "error", "expected"), [
    ({}, ValueError, "model_type"), ({"config": {"hidden_size": 8}}, ValueError, "hidden_size"), ({"config": CONFIG, "schedule": "wavy"}, ValueError, "cosine"),
    ({"config": CONFIG, "warmup_steps": -1}, ValueError, "warmup_steps"), ({"pretrained": "package:no_such_package"}, FileNotFoundError, "pip install"),
    ({"pretrained": "./no/such/folder"}, FileNotFoundError, "no/such/folder"),
])  # fmt: skip
def test_a_wrong_source_is_refused_when_it_is_made(options, error, expected):
    with pytest.raises(error, match=expected):
        CausalLM(**options)


def test_a_package_is_its_folder():
    assert resolve("package:transformers").endswith("transformers")


def test_a_folder_of_safetensors_is_loaded_as_transformers_loads_it(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    fields = {key: value for key, value in CONFIG.items() if key != "model_type"}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **fields)).save_pretrained(tmp_path)
    module = CausalLM(pretrained=str(tmp_path))
    module.configure_model()
    expected = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    ours = module.model.state_dict()
    assert all(torch.equal(ours[name], value) for name, value in expected.items())
