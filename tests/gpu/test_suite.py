"""The suite for a lent GPU runs from end to end here, on the emulated engine, so that minutes on a GPU are not spent on its faults."""

import json
import subprocess
import sys
from pathlib import Path

SUITE = Path(__file__).parents[2] / "benchmarks" / "gpu" / "suite.py"


def test_every_case_of_the_suite_has_a_result(tmp_path):
    run = subprocess.run([sys.executable, SUITE, "--tiny", "--out", tmp_path / "gpu.json"], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    cases = json.loads((tmp_path / "gpu.json").read_text())["cases"]
    assert {name: found["error"] for name, found in cases.items() if "error" in found} == {}
    assert {name.split()[0] for name in cases} == {"rates", "megatrain", "fsdp2", "plain", "deepest"}
    assert 11.9 < cases["megatrain tiny"]["bytes_a_parameter"] < 12.1
    assert 0 < cases["megatrain tiny"]["of_floor"] <= 1
