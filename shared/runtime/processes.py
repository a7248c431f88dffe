"""Several processes as one program: joining them, agreeing on something, and ending when one is lost.

What `jax.distributed` does by itself when a process dies: the others hang at their exit for the heartbeat's 100
seconds, or are aborted with a page of C++ log. Here they end with one clear line and exit code 1, at once when a
connection breaks, and within `heartbeat` seconds when a process stops answering (test_processes.py).
"""

import contextlib
import ctypes
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

from shared.config import check

START_TIMEOUT_S = 120
"""How long processes wait for one another at the start."""

LAUNCHERS = {
    "SLURM_NTASKS": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_NODELIST"),
    "OMPI_COMM_WORLD_SIZE": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
}
"""Variable with the number of processes to that with this one's, and others that must be there, of the launchers that
are noticed."""

KEPT: list[Any] = []
"""What C code holds a pointer to and Python must not free."""

JOINED: list[str] = []
"""How this process is called in what it says, once it has joined others. (Asking JAX could wait for a lost one.)"""


@dataclass(frozen=True)
class Cluster:
    """How this process finds the others. Slurm's and Open MPI's launchers are noticed; nothing need be given then."""

    coordinator: str | None = None
    """HOST:PORT of process 0, with --processes and --process-id, where no launcher says it."""
    processes: int | None = None
    """Number of processes."""
    process_id: int | None = None
    """Number of this process, from 0."""
    distributed: bool = False
    """Let JAX detect the cluster where it is not noticed: Kubernetes (with the kubernetes package) and TPU pods."""
    heartbeat: int = 10
    """Seconds without a sign of life after which a process counts as lost."""


def join(cluster: Cluster) -> int:
    """Meet the other processes, if there are to be any, and return how many there are (0: known once JAX has started).

    To be called before JAX first touches a device. Raises ValueError for flags that do not go together. Processes that
    do not come in `START_TIMEOUT_S` end those that wait, with exit code 1.
    """
    by_hand = (cluster.coordinator, cluster.processes, cluster.process_id)
    check(cluster.heartbeat >= 1, f"heartbeat is {cluster.heartbeat}; give at least 1 second")
    check(
        None not in by_hand or by_hand == (None, None, None),
        "--coordinator, --processes and --process-id go together; give all three or none",
    )
    launched = launched_processes()
    if cluster.coordinator is None and launched == 1 and not cluster.distributed:
        return 1
    if cluster.processes is not None and cluster.process_id is not None:
        check(cluster.processes >= 1, f"processes is {cluster.processes}; give at least 1")
        check(
            0 <= cluster.process_id < cluster.processes,
            f"process_id is {cluster.process_id}; give a number from 0 to {cluster.processes - 1}",
        )
        host, _, port = str(cluster.coordinator).rpartition(":")
        check(
            bool(host) and port.isdecimal() and 0 < int(port) < 2**16,
            f"coordinator is {cluster.coordinator}; give HOST:PORT, as in 10.0.0.1:1234",
        )
    if not JOINED:
        ranks = [os.environ[own] for count, (own, *_) in LAUNCHERS.items() if own in os.environ]
        number = ranks[0] if cluster.process_id is None and ranks else cluster.process_id
        JOINED.append("a process" if number is None else f"process {number}")
        say_when_aborted()
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


def say_when_aborted() -> None:
    """When the runtime gives up on another process, it logs why and aborts; let that end in one line and exit code 1.

    Python's own signal handlers would never run, as the abort comes from a thread of C++; so this one is set through C.
    """

    def aborted(number: int) -> None:
        end(
            "error: JAX's runtime has given up (its reason is above): mostly, another process died, stopped answering, "
            "or did not come; where there is a checkpoint, --resume goes on from it",
            1,
        )

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(aborted)
    KEPT.append(handler)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))


def end(line: str, code: int) -> NoReturn:
    """End this process with a line on standard error.

    Several processes leave without the farewell that JAX would wait for: another may be lost, or waiting for this one.
    """
    if not JOINED:
        print(line, file=sys.stderr)
        sys.exit(code)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        os.write(2, f"{JOINED[0]}: {line}\n".encode())
    if code == 2:
        time.sleep(1)  # bad input is found by all: without process 0, the others would be gone before they can say so
    os._exit(code)


def is_loss(error: Exception) -> bool:
    """Whether an error is how the loss of another process shows."""
    signs = ("Gloo", "NCCL", "UNAVAILABLE", "onnection", "DEADLINE_EXCEEDED")
    return bool(JOINED) and any(sign in str(error) for sign in signs)


def explain(error: Exception) -> str:
    """One line on an error that came while several processes ran; its traceback first if it is no lost connection."""
    if not is_loss(error):
        traceback.print_exception(error)
        return "error: this process failed (see above), which ends the others too"
    return (
        f"error: another process of this run is lost ({' '.join(str(error).split())[:160]}); "
        "where there is a checkpoint, --resume goes on from it"
    )


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
    """The first process's line that is not empty, in every process; empty if all of them are."""
    if jax.process_count() == 1:
        return problem
    lines = np.zeros(400, np.uint8)
    data = problem.encode()[: lines.size]
    lines[: len(data)] = np.frombuffer(data, np.uint8)
    found = np.asarray(multihost_utils.process_allgather(lines)).reshape(-1, lines.size)
    return next((row.tobytes().rstrip(b"\0").decode(errors="replace") for row in found if row.any()), "")


def wait_for_all(name: str) -> None:
    """Until every process has come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


class StopSignals:
    """Within it, SIGTERM or Ctrl-C asks a run to stop after a step; a second Ctrl-C ends it at once.

    With several processes it is enough that one of them is asked: JAX's preemption service, which has taken over
    SIGTERM, tells the others, and makes all of them stop after the same step.
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
        """Whether to stop after so many steps."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(done):
            self.received = signal.SIGTERM
        return self.received is not None
