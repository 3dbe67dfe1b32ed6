"""The commands, as a user types them, in processes of their own."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SMALL = ["model.config.hidden_size=32", "model.config.intermediate_size=64", "model.config.num_hidden_layers=2", "data.max_bytes=60000", "data.vocab_size=300",
         "data.tokens_per_row=32", "data.batch_size=2", "trainer.limit_val_batches=2", "sample.max_new_tokens=2", "progress_every=0"]  # fmt: skip


def run(*arguments, cwd, ok=True, script="train.py", env=None):
    command = [sys.executable, str(ROOT / script)] if script else [sys.executable, "-m", "lightning_megatrain"]
    done = subprocess.run([*command, *arguments], cwd=cwd, capture_output=True, text=True, env={**os.environ, **(env or {})})
    assert (done.returncode == 0) is ok, done.stdout + done.stderr
    return done.stdout + done.stderr


def results(folder, name="result.json"):
    return [json.loads(path.read_text()) for path in sorted(Path(folder).rglob(name))]


@pytest.mark.slow
def test_a_run_from_any_folder(tmp_path):
    out = run("train", *SMALL, "trainer.max_steps=3", cwd=tmp_path, script=None)
    (result,) = results(tmp_path)
    assert result["steps"] == 3
    assert result["host_bytes_per_parameter"] == pytest.approx(12, rel=0.15)  # tiny tensors are padded to cache lines
    assert "held-out perplexity" in out
    assert "for token frequencies alone" in out
    assert list(tmp_path.rglob("step3.ckpt"))
    assert list(tmp_path.rglob("metrics.csv"))


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    run(*SMALL, "trainer.max_steps=2", cwd=tmp_path)
    (path,) = tmp_path.rglob("step2.ckpt")
    run(*SMALL, "trainer.max_steps=3", f"resume={path}", cwd=tmp_path)
    assert sorted(result["steps"] for result in results(tmp_path)) == [2, 3]


@pytest.mark.slow
def test_a_sweep_ends_with_one_table(tmp_path):
    out = run("-m", "offload.prefetch_depth=1,2", "offload=emulated", *SMALL, "trainer.max_steps=2", cwd=tmp_path)
    (path,) = tmp_path.rglob("sweep.csv")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["setting"] for row in rows] == ["offload.prefetch_depth=1", "offload.prefetch_depth=2"]
    assert all(float(row[key]) > 0 for row in rows for key in ("step_seconds", "tokens_per_second", "host_bytes_per_parameter", "device_bytes"))
    assert "host bytes a parameter" in " ".join(out.split())


def test_70b_is_refused_before_anything_is_allocated(tmp_path):
    out = run("model=llama70b", "precision=bf16", "data.max_bytes=60000", "data.vocab_size=300", cwd=tmp_path, ok=False,
              env={"LIGHTNING_MEGATRAIN_HOST_BYTES": str(64 * 2**30)})  # fmt: skip
    text = " ".join(out.split())
    assert "MemoryError" in text
    assert "788.5 GiB" in text  # 70,553,706,496 parameters of 12 bytes
    assert "64.0 GiB" in text
    assert "in bf16-true" in text


def test_a_choice_that_does_not_exist_is_answered_with_those_that_do(tmp_path):
    out = run("model=llama71b", cwd=tmp_path, ok=False)
    assert "llama70b" in out
    assert "model" in out
    out = run("offload.prefetch_depht=3", cwd=tmp_path, ok=False)
    assert "prefetch_depht" in out


def test_a_wrong_value_names_the_field(tmp_path):
    assert "prefetch_depth: found -1" in run("offload.prefetch_depth=-1", *SMALL, cwd=tmp_path, ok=False)


def test_a_plan_without_a_machine_for_it(tmp_path):
    out = run("plan", "model=llama70b", "precision=bf16", cwd=tmp_path, script=None)
    assert "70.55B parameters, bf16-true" in out
    assert "131.4 GiB" in out  # the trail, and the bf16 plane: 2 bytes each
    assert "788.5 GiB" in out


def test_an_unknown_command_is_answered_with_the_known_ones(tmp_path):
    assert "expected one of train, plan" in run("fly", cwd=tmp_path, ok=False, script=None)


def test_every_config_composes_and_builds_on_the_meta_device():
    from hydra import compose, initialize_config_dir

    from lightning_megatrain.models.weights import build_meta, model_config

    expected = {"llama8b": 8.03e9, "llama70b": 70.55e9, "qwen2_5_7b": 7.62e9, "qwen2_5_14b": 14.77e9, "qwen2_5_32b": 32.76e9, "qwen2_5_72b": 72.71e9,
                "gpt_oss_120b": 116.83e9, "smollm2_135m": 134.5e6, "llama1b": 1.24e9, "llama3b": 3.21e9, "qwen2_5_0_5b": 0.494e9, "qwen2_5_3b": 3.09e9, "tiny_llama": 988_288}  # fmt: skip
    names = sorted(path.stem for path in (ROOT / "conf" / "model").glob("*.yaml"))
    assert set(names) == set(expected)
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        for name, precision in (("fp32", "32-true"), ("bf16", "bf16-true"), ("mixed", "bf16-mixed")):
            assert compose("train", [f"precision={name}"]).trainer.precision == precision
        for name in names:
            config = compose("train", [f"model={name}"])
            model = build_meta(model_config(config.model.config, None, None))
            assert sum(p.numel() for p in model.parameters()) == pytest.approx(expected[name], rel=0.01), name
