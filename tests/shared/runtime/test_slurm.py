"""A real Slurm of one node on loopback: the launcher is noticed, the batch script works, SIGTERM is obeyed.

Needs Slurm (on Debian the packages slurmctld, slurmd and slurm-client); .ci/run installs it where it may.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from shared.checkpoint.manifest import saved_steps
from tests.runs import COMPILED_ONCE, SMALL, TEXT, losses, train
from tests.shared.runtime.slurm_cluster import single_node

ROOT = Path(__file__).parents[3]
JOBS = ROOT / "docs" / "clusters"
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.skipif(not all(map(shutil.which, ("slurmctld", "slurmd", "sbatch"))), reason="Slurm is not installed"),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with single_node(tmp_path_factory.mktemp("slurm"), kill_wait=5) as environment:
        yield {**environment, **COMPILED_ONCE, "JAX_PLATFORMS": "cpu"}


def options(folder: Path, *more: object) -> list[str]:
    """The flags of tests/runs.py's `train`."""
    folder.mkdir(exist_ok=True)
    (folder / "text").write_bytes(TEXT)
    fixed = [*SMALL, "--dropout", "0.1", "--validation", "0", "--data", folder / "text"]
    kept = ["--metrics", folder / "metrics.jsonl", "--checkpoint-dir", folder / "checkpoints"]
    return list(map(str, [*fixed, *kept, *more]))


def test_srun_trains_in_two_processes(slurm: dict[str, str], tmp_path: Path):
    """No address is given: the same command, under `srun -n 2`, is a run of two processes."""
    sgd = ["--steps", 6, "--optimizer", "sgd", "--learning-rate", 0.1]
    command = [sys.executable, "-m", "explicit_shardmap", "train", *options(tmp_path / "slurm", *sgd, "--devices", 4)]
    done = subprocess.run(
        ["srun", "-n", "2", *command], cwd=ROOT, env=slurm, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    assert "4 cpu devices in 2 processes" in done.stdout
    assert done.stdout.count("step 6  loss") == 1
    train(tmp_path / "one", *sgd, "--devices", 4)
    np.testing.assert_allclose(losses(tmp_path / "slurm"), losses(tmp_path / "one"), rtol=2e-6)


def test_the_batch_script(slurm: dict[str, str], tmp_path: Path):
    """It trains, ends with 143 and all saved when its tasks get SIGTERM, is queued again by itself, and resumes."""
    environment = {**slurm, "TWINSTEP": str(ROOT), "PYTHON": sys.executable, "TWIN": "auto_sharding"}
    small = ["--nodes=1", "--ntasks-per-node=2", "--gpus-per-task=0", "--cpus-per-task=1", f"--output={tmp_path}/out"]
    flags = options(tmp_path, "--steps", 1000, "--checkpoint-every", 20)
    submitted = subprocess.run(
        ["sbatch", "--parsable", *small, str(JOBS / "train.sbatch"), *flags],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert submitted.returncode == 0, submitted.stderr
    job = submitted.stdout.strip()
    output = tmp_path / "out"
    wait_for(lambda: saved_steps(tmp_path / "checkpoints"), output)
    subprocess.run(["scancel", "--signal=TERM", job], env=environment, check=True, timeout=60)
    wait_for(lambda: "stopped by SIGTERM after step" in output.read_text(), output)
    wait_for(lambda: "resuming from step" in output.read_text(), output)
    assert output.read_text().count("starting at step 1") == 1
    subprocess.run(["scancel", job], env=environment, check=True, timeout=60)


def wait_for(happened: Callable[[], object], output: Path, limit: float = 120) -> None:
    """Until it has happened; fails with the job's output if it does not in so many seconds."""
    end = time.monotonic() + limit
    while not happened():
        assert time.monotonic() < end, output.read_text() if output.exists() else "no output"
        time.sleep(0.2)
