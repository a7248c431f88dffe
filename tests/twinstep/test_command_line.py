"""`python -m twinstep` on modules of somebody else's, in a folder of their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from twinstep.command_line import main

ROOT = Path(__file__).parents[2]
STEPS = """
import jax, jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

def gradients(params, x):
    return {"gradients": jax.grad(lambda p: ((x @ p) ** 2).mean())(params)}

def over_data(keep):
    mesh = jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))
    def local(params, x):
        params = lax.pcast(params, "data", to="varying") if keep else params
        return lax.pmean(gradients(params, x), "data")
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))

reference, right, wrong = jax.jit(gradients), over_data(True), over_data(False)

def inputs():
    return jnp.linspace(-1, 1, 12).reshape(4, 3), jnp.cos(jnp.arange(32.0)).reshape(8, 4)

def broken(*arguments):
    raise RuntimeError("a bug of the user's")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of another project's, with a module and a `shared` of its own; it is the current one."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "__init__.py").write_text("raise ImportError('another project')")
    (tmp_path / "their_steps.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "their_steps", raising=False)
    return tmp_path


def test_check(folder: Path, capsys: pytest.CaptureFixture[str]):
    shared = ["--inputs", "their_steps:inputs", "--json", "report.json"]
    assert main(["check", "their_steps:reference", "their_steps:right", *shared]) == 0
    assert json.loads(Path("report.json").read_text())["equal"] is True
    assert main(["check", "their_steps:reference", "their_steps:wrong", *shared]) == 1
    assert json.loads(Path("report.json").read_text())["equal"] is False
    printed = capsys.readouterr().out
    assert printed.startswith("equal: ")
    assert "8 times the reference, on 8 devices along data" in printed


def test_collectives(folder: Path, capsys: pytest.CaptureFixture[str]):
    command = ["collectives", "their_steps:right", "--inputs", "their_steps:inputs", "--json", "sent.json"]
    assert main(command) == 0
    assert "all_reduce over data: 48 input bytes of each device" in capsys.readouterr().out
    (entry,) = json.loads(Path("sent.json").read_text())["collectives"]
    assert (entry["kind"], entry["axes"], entry["bytes"], entry["source"]) == (
        "all_reduce",
        ["data"],
        48,
        "their_steps.py:13",
    )
    assert main([*command, "--traced"]) == 0
    snapshot = ["--snapshot", "sent_snapshot.json"]
    assert main([*command, *snapshot]) == 1
    assert main([*command, *snapshot, "--update"]) == 0
    assert main([*command, *snapshot]) == 0
    assert main(["collectives", "their_steps:reference", "--inputs", "their_steps:inputs"]) == 0
    assert "nothing is sent between devices" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["their_steps"], "'their_steps' names no function; write it as package.module:name"),
        (["nowhere:step"], "there is no module 'nowhere' in "),
        (["their_steps:nothing"], "their_steps:nothing: there is no 'nothing' in their_steps"),
        (["their_steps:gradients"], "gradients is not jitted; give jax.jit of it, with arguments"),
        (["their_steps:right", "--devices", "0"], "--devices is 0; give at least 1"),
        (["their_steps:right", "--update"], "--update writes a snapshot; give its file with --snapshot"),
        (["their_steps:right", "--inputs", "their_steps:broken"], "RuntimeError: a bug of the user's"),
        (["their_steps:right", "--json", "no/such/folder"], "No such file or directory: 'no/such/folder'"),
    ],
)
def test_what_cannot_be_done_ends_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
):
    assert main(["collectives", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_simulated_devices_from_another_folder(folder: Path):
    """As a user types it: a process of its own, whose CPU is to be 4 devices."""
    command = ["-m", "twinstep", "collectives", "their_steps:right", "--inputs", "their_steps:inputs", "--devices", "4"]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=120, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].split()[:6] == ["all_reduce", "data", "4", "1", "1", "48"]
