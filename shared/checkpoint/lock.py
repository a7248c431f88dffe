"""One run owns a checkpoint folder while it trains."""

import fcntl
import os
import socket
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from shared.checkpoint.errors import as_input_error
from shared.config import InputError, check
from shared.runtime import processes


@contextmanager
def locked(directory: Path, note: Callable[[str], None]) -> Generator[None]:
    """Own the directory, which is created if need be, until the context or the process ends, however it ends.

    Process 0 holds an advisory lock (flock) on DIR/.lock. Local file systems and NFS, where the lock also holds between
    hosts, have such locks; where a file system has none, `note` is called with a warning. Raises ValueError, in all
    processes, if another run owns the directory or it cannot be written to.
    """
    file, problem = None, ""
    if processes.is_first():
        try:
            file = acquire(directory, note)
        except InputError as error:
            problem = str(error)
    problem = processes.first_problem(problem)
    check(not problem, problem)
    try:
        yield
    finally:
        if file:
            file.close()


def acquire(directory: Path, note: Callable[[str], None]) -> TextIO:
    """Return the locked file. Raises ValueError as `locked` does."""
    with as_input_error(f"cannot write checkpoints to {directory}", "give --checkpoint-dir a folder to write to"):
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / ".lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "another run"
        file.close()
        raise InputError(
            f"{directory} is in use by {owner}; wait until that run has ended, or give another --checkpoint-dir"
        ) from None
    except OSError as error:
        note(f"warning: {directory} cannot be locked ({error.strerror}); make sure that no other run saves to it")
    with suppress(OSError):  # a full disk is found where it matters
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, started {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        file.flush()
    return file
