"""The parent process of a run: how the run ends is how it ends, but for an abort."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SUPERVISED = "import os, signal, sys, time; from shared.runtime.supervisor import supervise; supervise('the line')\n"
LISTENING = SUPERVISED + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print(os.getpid(), flush=True)\n"


def start(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("end", "code", "printed"),
    [
        ("print('done')", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("os.abort()", 1, "the line\n"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("os.kill(os.getpid(), signal.SIGTERM)", -15, ""),
    ],
)
def test_an_abort_becomes_a_line_and_exit_code_1_and_other_ends_stay(end: str, code: int, printed: str):
    process = start(SUPERVISED + end)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (code, printed)
    assert out == ("done\n" if end.startswith("print") else "")


def test_signals_are_forwarded():
    process = start(LISTENING + "time.sleep(30)")
    assert process.stdout is not None
    assert int(process.stdout.readline()) != process.pid
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 7


def test_the_child_does_not_outlive_a_killed_parent():
    process = start(LISTENING + "time.sleep(30)")
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    process.communicate(timeout=10)  # waits until the child, too, has closed the output
    for _ in range(100):
        try:
            os.kill(child, 0)
            state = Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return
        if state == "Z":  # dead, and nobody's yet
            return
        time.sleep(0.05)
    pytest.fail("the child runs on")
