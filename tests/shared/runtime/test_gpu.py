"""The whole comparison on the accelerators there are: `pytest -m gpu`. Skipped where there are none."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shared.runtime import startup

ROOT = Path(__file__).parents[3]


@pytest.mark.gpu
@pytest.mark.skipif(not startup.accelerator_installed(), reason="no plug-in for an accelerator is installed")
def test_compare_on_what_there_is(tmp_path: Path):
    """In a process of its own, as this one holds simulated devices."""
    path = tmp_path / "compare.json"
    command = [sys.executable, "-m", "bench", "compare", "--rounds", "2", "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    if found["runtime"]["platform"] == "cpu":
        pytest.skip("the plug-in found no accelerator")
    assert found["equal"]
