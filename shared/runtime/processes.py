"""Several processes as one program: joining them, agreeing on a value, and exiting when one is lost.

`jax.distributed` alone leaves the others hanging at exit for 100 seconds when a process dies, or aborts them with a
page of C++ log. Here each ends with one clear line and exit code 1: at once when a connection breaks, and within
`heartbeat` seconds when a process stops answering (tests/shared/runtime/test_processes.py).
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from shared.config import MOST_DEVICES, check, check_range
from shared.runtime.supervisor import supervise

START_TIMEOUT_S = 120
"""How long processes wait for one another at the start."""

RESUME = "where there is a checkpoint, --resume continues from it"

LAUNCHERS = {
    "SLURM_NTASKS": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_NODELIST"),
    "OMPI_COMM_WORLD_SIZE": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
}
"""Per launcher: the variable with the number of processes, to the variables for this one's number and others that are
set where it has started one."""


@dataclass(frozen=True)
class Cluster:
    """How this process finds the others. Under Slurm's and Open MPI's launchers nothing need be given."""

    coordinator: str | None = None
    """HOST:PORT of process 0, with --processes and --process-id, where no launcher provides it."""
    processes: int | None = None
    """Number of processes."""
    process_id: int | None = None
    """Number of this process, from 0."""
    distributed: bool = False
    """Let JAX detect other clusters: Kubernetes (with the kubernetes package) and TPU pods."""
    heartbeat: int = 10
    """Seconds without an answer after which a process counts as lost."""


def join(cluster: Cluster) -> int:
    """Join the other processes, if there are to be any; return how many there are (0: known once JAX has started).

    To be called before JAX first touches a device. The run continues in a child of the process that was started
    (supervisor.py). Raises ValueError for flags that do not go together. Processes that do not join within
    `START_TIMEOUT_S` end those that wait, with exit code 1.
    """
    by_hand = (cluster.coordinator, cluster.processes, cluster.process_id)
    check_range("heartbeat", cluster.heartbeat, 1, 86_400)
    check(
        None not in by_hand or by_hand == (None, None, None),
        "--coordinator, --processes and --process-id go together; give all three or none",
    )
    launched = launched_processes()
    if cluster.coordinator is None and launched == 1 and not cluster.distributed:
        return 1
    if cluster.processes is not None and cluster.process_id is not None:
        check_range("processes", cluster.processes, 1, MOST_DEVICES)
        check(
            0 <= cluster.process_id < cluster.processes,
            f"process_id is {cluster.process_id}; give a number from 0 to {cluster.processes - 1}",
        )
        host, _, port = str(cluster.coordinator).rpartition(":")
        check(
            bool(host) and port.isdecimal() and 0 < int(port) < 2**16,
            f"coordinator is {cluster.coordinator}; give HOST:PORT, as in 10.0.0.1:1234",
        )
    if not jax.distributed.is_initialized():
        ranks = [os.environ[own] for own, *_ in LAUNCHERS.values() if own in os.environ]
        number = ranks[0] if cluster.process_id is None and ranks else cluster.process_id
        name = "a process" if number is None else f"process {number}"
        supervise(
            f"{name}: error: JAX's runtime aborted (its reason is above); most often another process died, stopped "
            f"answering or did not come; {RESUME}"
        )
        multiprocessing.current_process().name = name  # asking JAX for it later could wait for a lost process
        try:
            jax.distributed.initialize(
                *by_hand, heartbeat_timeout_seconds=cluster.heartbeat, initialization_timeout=START_TIMEOUT_S
            )
        except (ValueError, RuntimeError, OSError) as error:
            check(False, f"the processes cannot be joined ({error}); give --coordinator, --processes and --process-id")
    return cluster.processes or (launched if launched > 1 else 0)


def launched_processes() -> int:
    """Number of processes that a launcher has started, by its variables; 1 if there is none."""
    for count, others in LAUNCHERS.items():
        if all(name in os.environ for name in (count, *others)):
            return int(os.environ[count])
    return 1


def end(line: str, code: int) -> NoReturn:
    """End this process with a line on standard error.

    Several processes exit without JAX's shutdown, which would wait for another that is lost or is waiting for this one.
    """
    if not jax.distributed.is_initialized():
        print(line, file=sys.stderr)
        sys.exit(code)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        os.write(2, f"{multiprocessing.current_process().name}: {line}\n".encode())
    if code == 2:
        time.sleep(1)  # all processes find bad input; without process 0, the others would be aborted before they report
    os._exit(code)


def is_loss(error: Exception) -> bool:
    """Whether an error is how the loss of another process shows."""
    signs = ("Gloo", "NCCL", "UNAVAILABLE", "onnection", "DEADLINE_EXCEEDED")
    return jax.distributed.is_initialized() and any(sign in str(error) for sign in signs)


def explain(error: Exception) -> str:
    """Return one line on an error of one of several processes; print its traceback unless a connection was lost."""
    if not is_loss(error):
        traceback.print_exception(error)
        return "error: this process failed (see above), which ends the others too"
    return f"error: another process of this run is lost ({' '.join(str(error).split())[:160]}); {RESUME}"


def is_first() -> bool:
    """Whether this is the process that prints and writes metrics."""
    return jax.process_index() == 0


def from_first(value: Any) -> Any:
    """Process 0's value, in every process."""
    if jax.process_count() == 1:
        return value
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(data.size)))
    return pickle.loads(np.asarray(multihost_utils.broadcast_one_to_all(np.resize(data, size))).tobytes())


def first_problem(problem: str) -> str:
    """Return the first non-empty line of any process, in every process; empty if all are."""
    if jax.process_count() == 1:
        return problem
    lines = np.zeros(400, np.uint8)
    data = problem.encode()[: lines.size]
    lines[: len(data)] = np.frombuffer(data, np.uint8)
    found = np.asarray(multihost_utils.process_allgather(lines)).reshape(-1, lines.size)
    return next((row.tobytes().rstrip(b"\0").decode(errors="replace") for row in found if row.any()), "")


def wait_for_all(name: str) -> None:
    """Wait until every process has called this."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


class StopSignals:
    """Context in which SIGTERM or Ctrl-C stops a run after the current step; a second Ctrl-C ends it at once.

    Of several processes it is enough to signal one: JAX's preemption service, which handles SIGTERM there, makes all of
    them stop after the same step.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        watched = [signal.SIGINT] if jax.process_count() > 1 else [signal.SIGINT, signal.SIGTERM]
        self.handlers = {number: signal.signal(number, self.ask) for number in watched}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.handlers = {}

    def ask(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        self.__exit__()
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.received = signal.Signals(number)

    def __call__(self, done: int) -> bool:
        """Whether to stop after this many steps."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(done):
            self.received = signal.SIGTERM
        return self.received is not None
