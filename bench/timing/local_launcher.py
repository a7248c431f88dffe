"""Several processes on this machine, as a launcher would start them on several."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from shared.config import InputError

ROOT = Path(__file__).parents[2]


def start(
    arguments: Sequence[str],
    processes: int,
    each: Callable[[int], Sequence[str]] = lambda number: (),
    **environment: str,
) -> list[subprocess.Popen[str]]:
    """`python` with these arguments, and what `each` adds, in so many processes, which find each other on loopback.

    Each computes with as many threads as are its share of the cores, so that they do not wait for one another's. (They
    are not bound to cores: gloo has a thread of its own, which one core would share with the step's.)
    """
    coordinator = f"127.0.0.1:{free_port()}"
    threads = str(max((os.cpu_count() or 1) // processes, 1))
    return [
        subprocess.Popen(
            [
                *(sys.executable, *arguments, *each(number)),
                *("--coordinator", coordinator, "--processes", str(processes), "--process-id", str(number)),
            ],
            cwd=ROOT,
            env={**os.environ, "NPROC": threads, "PJRT_NPROC": threads, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(processes)
    ]


def finish(started: Sequence[subprocess.Popen[str]], timeout: float) -> list[subprocess.CompletedProcess[str]]:
    """Wait for all of them; those that still run after so many seconds are killed, and TimeoutExpired is raised."""
    end = time.monotonic() + timeout
    try:
        ended = []
        for process in started:
            out, err = process.communicate(timeout=max(end - time.monotonic(), 0.1))
            ended.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
        return ended
    finally:
        for process in started:
            process.kill()


def run_together(arguments: Sequence[str], processes: int) -> str:
    """What the first of so many processes prints, all of them at their end. Raises InputError if one fails."""
    ended = finish(start(arguments, processes), timeout=600)
    failed = [process for process in ended if process.returncode]
    if failed:
        raise InputError(failed[0].stderr.strip())
    return re.sub(r"\[Gloo\].*\n", "", ended[0].stdout)


def free_port() -> int:
    """A port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
