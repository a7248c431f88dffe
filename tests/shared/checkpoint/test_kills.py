"""Real runs, killed at many moments, stopped by signals, and resumed."""

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

from shared.checkpoint.manifest import saved_steps
from shared.checkpoint.reader import verify
from tests.runs import COMPILED_ONCE, SMALL, TEXT, losses

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
STEPS = 300


def start(
    folder: Path, *options: str, program: str = "auto_sharding", limit: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """A run of STEPS steps that saves after every fifth."""
    folder.mkdir(exist_ok=True)
    (folder / "text").write_bytes(TEXT)
    run = [sys.executable, "-m", program, "train", *SMALL, "--dropout", "0.1", "--validation", "0", "--devices", "2"]
    kept = ["--metrics", str(folder / "metrics.jsonl"), "--checkpoint-dir", str(folder / "checkpoints")]
    often = ["--steps", str(STEPS), "--checkpoint-every", "5", "--keep", "3", "--data", str(folder / "text")]
    return subprocess.Popen(
        [*limit, *run, *kept, *often, *options],
        cwd=ROOT,
        env={**os.environ, **COMPILED_ONCE},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_step(folder: Path, process: subprocess.Popen[str], after: int) -> None:
    """Until a checkpoint of a later step is committed."""
    for _ in range(6000):
        if max(saved_steps(folder / "checkpoints"), default=0) > after:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    pytest.fail("no checkpoint within five minutes")


def test_kill_9_at_many_moments_loses_no_committed_step(tmp_path: Path):
    """The times of the kills are spread over a whole cycle of steps, saves, commits and removals of old steps.

    Each run resumes from the last; in the end the losses are those of a run that was left alone, bit for bit.
    """
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    random = np.random.default_rng(0)
    newest, kills = 0, 0
    while newest < STEPS - 60 and kills < 6:
        process = start(parts, "--resume")
        wait_for_step(parts, process, newest)
        before = saved_steps(parts / "checkpoints")
        time.sleep(random.uniform(0, 0.5))
        process.kill()
        process.communicate()
        kills += 1
        newest, *_ = saved_steps(parts / "checkpoints")
        assert newest >= before[0]
        assert not verify(parts / "checkpoints", newest).problem
    assert kills >= 3
    for folder, options in ((parts, ["--resume"]), (whole, [])):
        process = start(folder, *options)
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
    assert "warning" not in out
    np.testing.assert_array_equal(losses(parts), losses(whole))
    assert len(losses(parts)) == STEPS


@pytest.mark.parametrize(
    ("number", "program"), [(signal.SIGTERM, "auto_sharding"), (signal.SIGINT, "explicit_shardmap")]
)
def test_a_signal_saves_and_ends_cleanly(number: signal.Signals, program: str, tmp_path: Path):
    """Within a step and a save; with an exit code that tells a launcher that the run is not done."""
    process = start(tmp_path, program=program)
    wait_for_step(tmp_path, process, 0)
    begin = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - begin < 20
    assert process.returncode == 128 + number
    assert err == ""
    stopped = re.search(rf"stopped by {number.name} after step (\d+), which is saved; .* --resume continues", out)
    assert stopped
    newest, *_ = saved_steps(tmp_path / "checkpoints")
    assert newest == int(stopped.group(1))
    assert not verify(tmp_path / "checkpoints", newest).problem
    assert len(losses(tmp_path)) == newest  # no record is lost
    process = start(tmp_path, "--resume")
    wait_for_step(tmp_path, process, newest)
    process.send_signal(number)
    time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)  # signalled twice: it may end at once, and what was saved stays
    assert process.returncode in (128 + number, -number)
    assert "Traceback" not in err
    assert not verify(tmp_path / "checkpoints", newest).problem or newest not in saved_steps(tmp_path / "checkpoints")


@pytest.mark.parametrize("kilobytes", [2, 20])
def test_a_disk_that_is_full(kilobytes: int, tmp_path: Path):
    """One line and exit code 2, whether metrics or a checkpoint cannot be written; what was saved before is kept."""
    process = start(tmp_path)
    wait_for_step(tmp_path, process, 0)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    newest, *_ = saved_steps(tmp_path / "checkpoints")
    if kilobytes > 2:
        (tmp_path / "metrics.jsonl").write_text("")
    process = start(tmp_path, "--resume", limit=["bash", "-c", f'ulimit -f {kilobytes}; exec "$@"', "bash"])
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2, err
    assert err.startswith("error: cannot save step" if kilobytes > 2 else "error: [Errno 27] File too large")
    assert err.count("\n") == 1, err
    assert not verify(tmp_path / "checkpoints", newest).problem
