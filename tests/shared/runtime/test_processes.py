"""Real processes on loopback over gloo: the same run as in one process, and an end that is clear when one is lost."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from bench.timing.local_launcher import finish, free_port, start
from shared.checkpoint.manifest import saved_steps
from shared.checkpoint.reader import verify
from tests.runs import COMPILED_ONCE, SMALL, TEXT, TWINS, losses, train

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
LIMIT_S = 300
"""After so long a run that has not ended, or not saved, hangs; several processes on a busy machine start slowly."""
NAMES = list(TWINS)
GLOO = re.compile(r"\[Gloo\]|Rank|is connected to|peer ranks\.|Expected number of connected peer ranks is :|[\d\s]")
"""What gloo itself prints, in pieces: two devices of one process may connect at once, each writing into the other's."""


def start_run(
    folder: Path, processes: int, devices: int, *options: object, twin: str = "auto_sharding"
) -> list[subprocess.Popen[str]]:
    """`train` as tests/runs.py does it, in several processes."""
    folder.mkdir(exist_ok=True)
    (folder / "text").write_bytes(TEXT)
    fixed = ["train", *SMALL, "--dropout", "0.1", "--validation", "0", "--data", folder / "text", "--devices", devices]
    kept = ["--metrics", folder / "metrics.jsonl", "--checkpoint-dir", folder / "checkpoints"]
    return start(["-m", twin, *map(str, [*fixed, *kept, *options])], processes, **COMPILED_ONCE)


def run(folder: Path, processes: int, devices: int, *options: object, twin: str) -> list[str]:
    """The same to its end; what each process printed."""
    ended = finish(start_run(folder, processes, devices, *options, twin=twin), LIMIT_S)
    assert [process.returncode for process in ended] == [0] * processes, [process.stderr for process in ended]
    return [process.stdout for process in ended]


@pytest.mark.parametrize(
    ("processes", "devices", "twin"),
    [(2, 2, "auto_sharding"), (2, 4, "explicit_shardmap"), (4, 4, "explicit_shardmap"), (4, 8, "auto_sharding")],
)
def test_the_same_losses_as_one_process(processes: int, devices: int, twin: str, tmp_path: Path):
    """One and two devices in each; and only process 0 prints and writes."""
    options = ["--steps", 6, "--optimizer", "sgd", "--learning-rate", 0.1]
    printed = run(tmp_path / "several", processes, devices, *options, twin=twin)
    assert "step 6  loss" in printed[0]
    assert f"{devices} cpu devices in {processes} processes" in printed[0]
    assert [GLOO.sub("", text) for text in printed[1:]] == [""] * (processes - 1)
    train(tmp_path / "one", *options, "--devices", devices, twin=twin)
    np.testing.assert_allclose(losses(tmp_path / "several"), losses(tmp_path / "one"), rtol=2e-6)
    head = json.loads((tmp_path / "several" / "metrics.jsonl").read_text().splitlines()[0])
    assert (head["processes"], head["mesh"]) == (processes, {"data": devices})


LONG = ["--steps", 250, "--optimizer", "sgd", "--learning-rate", 0.02, "--checkpoint-every", 20]


def wait_for_step(folder: Path, after: int, started: Sequence[subprocess.Popen[str]]) -> None:
    """Until a checkpoint of a later step is committed."""
    for _ in range(20 * LIMIT_S):
        if max(saved_steps(folder / "checkpoints"), default=0) > after:
            return
        assert all(process.poll() is None for process in started), finish(started, 1)
        time.sleep(0.05)
    pytest.fail(f"no checkpoint within {LIMIT_S} s")


def test_a_run_moves_between_two_processes_and_one(tmp_path: Path):
    """Stopped by a signal to one of two, resumed in one process, then in four of the other twin."""
    started = start_run(tmp_path, 2, 4, *LONG)
    wait_for_step(tmp_path, 0, started)
    started[1].send_signal(signal.SIGTERM)
    ended = finish(started, LIMIT_S)
    assert [process.returncode for process in ended] == [128 + signal.SIGTERM] * 2
    step = saved_steps(tmp_path / "checkpoints")[0]
    assert f"stopped by SIGTERM after step {step}, which is saved" in ended[0].stdout
    assert not verify(tmp_path / "checkpoints", step).problem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shared.runtime.processes.StopSignals.__call__", lambda self, done: done == step + 1)
        train(tmp_path, *LONG, "--devices", 4, "--resume")
    assert saved_steps(tmp_path / "checkpoints")[0] == step + 1
    run(tmp_path, 4, 4, *LONG, "--resume", twin="explicit_shardmap")
    train(tmp_path / "one", *LONG, "--devices", 4)
    np.testing.assert_allclose(losses(tmp_path), losses(tmp_path / "one"), rtol=2e-5)


@pytest.mark.parametrize(
    ("number", "victim", "limit"),
    [(signal.SIGKILL, 0, 5), (signal.SIGKILL, 1, 5), (signal.SIGSTOP, 0, 20), (signal.SIGSTOP, 1, 20)],
)
def test_a_lost_process_ends_the_others_with_a_clear_message(
    number: signal.Signals, victim: int, limit: float, tmp_path: Path
):
    """At once when it is killed, within the heartbeat of 10 s (and some) when it stops answering; --resume continues.

    Process 0 is killed by way of its parent, process 1 itself (shared/runtime/supervisor.py).
    """
    started = start_run(tmp_path, 2, 2, *LONG, twin=NAMES[victim])
    wait_for_step(tmp_path, 0, started)
    begin = time.monotonic()
    lost, other = started[victim], started[1 - victim]
    os.kill(lost.pid if (number, victim) == (signal.SIGKILL, 0) else worker(lost), number)
    _, err = other.communicate(timeout=LIMIT_S)
    took = time.monotonic() - begin
    if number == signal.SIGSTOP:
        lost.kill()
    finish([lost], 5)
    assert lost.returncode == -signal.SIGKILL
    assert other.returncode == 1, err
    assert took < limit
    # One line of ours; threads of JAX's runtime may still log after it.
    (line,) = (line for line in err.splitlines() if line.startswith(f"process {1 - victim}: error: "))
    assert "another process" in line
    assert "--resume continues from it" in line
    if (number, victim) == (signal.SIGKILL, 1):
        newest = saved_steps(tmp_path / "checkpoints")[0]
        again = start_run(tmp_path, 2, 2, *LONG, "--resume", twin=NAMES[victim])
        wait_for_step(tmp_path, newest, again)
        for process in again:
            process.kill()


def worker(process: subprocess.Popen[str]) -> int:
    """The process number of the child that trains."""
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(child)


def test_a_process_that_never_comes(tmp_path: Path):
    """The others wait for it as long as they say, and no longer."""
    (tmp_path / "text").write_bytes(TEXT)
    script = (
        "import auto_sharding; from shared.cli.main import main; from shared.runtime import processes\n"
        "processes.START_TIMEOUT_S = 3\n"
        f"main(auto_sharding.build, 'auto_sharding', ['train', '--coordinator', '127.0.0.1:{free_port()}', "
        "'--processes', '2', '--process-id', '0'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 1
    assert "did not come" in done.stderr.strip().splitlines()[-1]


def test_bad_input_is_told_by_every_process(tmp_path: Path):
    for process in finish(start_run(tmp_path, 2, 2, "--batch", 9), LIMIT_S):
        assert process.returncode == 2
        assert "error: batch=9 cannot be split evenly over 2 devices" in process.stderr
        assert "Traceback" not in process.stderr


def test_processes_with_different_flags_are_told_so(tmp_path: Path):
    """They would compute different steps, or wait for one another for ever."""
    (tmp_path / "text").write_bytes(TEXT)
    started = start(
        ["-m", "auto_sharding", "train", *SMALL, "--data", str(tmp_path / "text")],
        processes=2,
        each=lambda number: ["--seed", str(number), "--checkpoint-every", str(5 + number)],
    )
    for process in finish(started, LIMIT_S):
        assert process.returncode == 2, process.stderr
        expected = "error: processes differ in seed (1, in process 0 0); checkpoint_every (6, in process 0 5)"
        assert expected in process.stderr


def test_generation_is_the_same_in_two_processes(tmp_path: Path):
    """Each holds half of the rows; process 0 alone prints."""
    train(tmp_path, "--steps", 2, "--devices", 2)
    command = ["generate", "--checkpoint-dir", str(tmp_path / "checkpoints"), "--tokens", "12", "--samples", "2"]
    printed = []
    for processes in (1, 2):
        started = start(["-m", "auto_sharding", *command, "--devices", "2"], processes, **COMPILED_ONCE)
        ended = finish(started, LIMIT_S)
        assert all(process.returncode == 0 for process in ended), [process.stderr for process in ended]
        printed.append([re.sub(r"\[Gloo\].*\n", "", process.stdout) for process in ended])
    assert printed[0] == printed[1][:1]
    assert printed[1][1] == ""


def test_each_process_reads_only_its_rows():
    script = (
        "import sys, auto_sharding\n"
        "from shared.runtime import startup\n"
        "from shared.placement.mesh import make_mesh\n"
        "from shared.placement.placing import local_rows\n"
        "from shared.runtime.processes import Cluster\n"
        "from tests.small import small_config\n"
        "_, devices = startup.start_all(Cluster(sys.argv[2], int(sys.argv[4]), int(sys.argv[6])), 4)\n"
        "twin = auto_sharding.build(small_config(), make_mesh('data_parallel', devices))\n"
        "rows = local_rows(twin.plan.layout, 8)\n"
        "print('rows', rows.start, rows.stop)\n"
    )
    started = start(["-c", script], processes=2)
    ended = finish(started, LIMIT_S)
    assert [process.stdout.splitlines()[-1:] for process in ended] == [["rows 0 4"], ["rows 4 8"]], ended
