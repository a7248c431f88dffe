"""The plugin in a project of somebody else's, in processes of its own: one, and several under xdist."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import jax, jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P
from twinstep import collectives

def step(double):
    mesh = jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))
    def local(x):
        x = lax.pcast(lax.psum(x, "data"), "data", to="varying")
        return lax.psum(x * x, "data") if double else lax.psum(x[:1] * x[:1], "data")
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P()))

X = jnp.ones(8)

def test_devices():
    assert jax.device_count() == 4

def test_snapshot(collectives_snapshot):
    collectives_snapshot(step(False), X)

def test_two(collectives_snapshot):
    collectives_snapshot(step(False), X, name="single")
    collectives_snapshot(step(DOUBLE), X, name="double")

def test_lists():
    assert collectives(step(False), X) == collectives(step(DOUBLE), X)
"""


def pytest_in(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "twinstep.pytest_plugin", "--twinstep-devices", "4", *flags]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=180, env={"PYTHONPATH": str(ROOT)}
    )


def test_another_projects_tests(tmp_path: Path):
    """Snapshots are missing, are written by two processes at once, pass; then a step changes, and failures say how."""
    file = tmp_path / "test_their_step.py"
    file.write_text(TESTS.replace("DOUBLE", "False"))
    updated = pytest_in(tmp_path, "--twinstep-update", "-n", "2")
    assert "4 passed" in updated.stdout, updated.stdout + updated.stderr
    snapshots = sorted(path.name for path in (tmp_path / "snapshots").iterdir())
    assert snapshots == [
        "test_their_step-test_snapshot.json",
        "test_their_step-test_two-double.json",
        "test_their_step-test_two-single.json",
    ]
    assert json.loads((tmp_path / "snapshots" / snapshots[0]).read_text())["mesh"] == {"data": 4}
    file.write_text(TESTS.replace("DOUBLE", "True"))
    (tmp_path / "snapshots" / snapshots[0]).unlink()
    failed = pytest_in(tmp_path)
    assert "3 failed, 1 passed" in failed.stdout, failed.stdout + failed.stderr
    for expected in (
        "there is no snapshot snapshots/test_their_step-test_snapshot.json; write it with --twinstep-update",
        "all_reduce over data: 16 bytes in 2 runs, but 12 bytes in 2 runs expected",
        "only on the right: 1 x all_reduce over data, 4 devices: 1 array, 8 bytes of float32, source test_their_step",
    ):
        assert expected in failed.stdout, failed.stdout
    assert "expected.py" not in failed.stdout  # the failure is shown where the test asks, not inside of the instruments


@pytest.mark.parametrize("flags", [("--twinstep-devices", "0")])
def test_a_wrong_number_of_devices(tmp_path: Path, flags: tuple[str, ...]):
    done = pytest_in(tmp_path, *flags)
    assert done.returncode == 4
    assert "--twinstep-devices is 0; give at least 1" in done.stderr
