"""The kernel's thread pool under ThreadSanitizer."""

import shutil
import subprocess
from pathlib import Path

import pytest

import lightning_megatrain.optim

COMPILER = shutil.which("g++") or shutil.which("clang++")
FLAGS = ["-std=c++17", "-O1", "-g", "-pthread", "-fsanitize=thread", "-ffp-contract=off"]


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_no_thread_reads_what_another_writes(tmp_path):
    assert COMPILER is not None
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() { return 0; }\n")
    built = subprocess.run([COMPILER, *FLAGS, probe, "-o", tmp_path / "probe"], capture_output=True)
    if built.returncode or subprocess.run([tmp_path / "probe"], capture_output=True).returncode:
        pytest.skip("this machine's compiler has no ThreadSanitizer, or its kernel doesn't let it run")
    sources = Path(lightning_megatrain.optim.__file__).parent
    subprocess.run([COMPILER, *FLAGS, f"-I{sources}", Path(__file__).parent / "race.cpp", "-o", tmp_path / "race"], check=True, timeout=300)
    run = subprocess.run([tmp_path / "race"], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[:4000]
