"""A parent process that turns an abort of JAX's runtime into one line and exit code 1."""

import os
import signal
import sys
import threading
from types import FrameType

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def supervise(line: str) -> None:
    """Fork. The child returns and runs on; the parent waits for it and exits as it did, an abort becoming `line` and 1.

    When another process of a run is lost, JAX's runtime calls `abort` on a C++ thread (exit code 134). No handler in
    that process can run Python safely then, so the translation is done from outside. To be called before JAX has
    started, while this process has no threads of its own.

    Signals to the parent are forwarded. The child has a process group of its own, or Ctrl-C would reach it twice; if
    the parent is killed, the child exits, as the pipe between them closes.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.setpgid(0, 0)
        threading.Thread(target=exit_with_parent, args=(read_end,), daemon=True).start()
        return
    os.close(read_end)

    def forward(number: int, frame: FrameType | None) -> None:
        os.kill(child, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == -signal.SIGABRT:
        os.write(2, f"{line}\n".encode())
        os._exit(1)
    if code < 0:  # end by the same signal, which is what a launcher reports
        if -code in FORWARDED:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        os._exit(128 - code)
    os._exit(code)


def exit_with_parent(read_end: int) -> None:
    """Wait until the pipe's other end is closed, which the kernel does when the parent ends, then end this process."""
    os.read(read_end, 1)
    os.kill(os.getpid(), signal.SIGKILL)
