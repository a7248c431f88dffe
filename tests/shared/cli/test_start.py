"""The first seconds of every command line: Ctrl-C is one word, and a setting that JAX refuses is one line."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COMMANDS = {
    "auto_sharding": ["train", "--steps", "1"],
    "explicit_shardmap": ["train", "--steps", "1"],
    "bench": ["ledger", "--devices", "2"],
    "twinstep": ["collectives", "jax.numpy:sin", "--devices", "2"],
}
PLACES = ("jax._src.config", "jax._src.lax.lax", "jax")
LATER = ("flax.core", "flax.nnx", "optax", "tyro", "shared.cli.train")


def start(command: str, *flags: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *flags, "-m", command, *COMMANDS[command]],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def interrupted_after_importing(command: str, module: str) -> tuple[int, list[str]]:
    """Interrupt a command when Python reports that it has imported the module; return its exit code and its lines."""
    with start(command, "-X", "importtime") as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("import time:") and line.rsplit("|")[-1].strip() == module:
                process.send_signal(signal.SIGINT)
                break
        else:
            pytest.fail(f"python -m {command} does not import {module}")
        lines = [line.strip() for line in process.stderr if not line.startswith("import time:")]
    return process.returncode, lines


@pytest.mark.parametrize("command", COMMANDS)
def test_an_interrupt_while_jax_is_imported_is_one_word(command: str):
    assert interrupted_after_importing(command, PLACES[0]) == (130, ["interrupted"])


@pytest.mark.slow
@pytest.mark.parametrize("module", [*PLACES[1:], *LATER])
@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "twinstep"])
def test_an_interrupt_at_any_import_is_one_word(command: str, module: str):
    assert interrupted_after_importing(command, module) == (130, ["interrupted"])


@pytest.mark.slow
def test_an_interrupt_of_the_instruments_at_a_later_import_is_one_word():
    assert interrupted_after_importing("twinstep", PLACES[1]) == (130, ["interrupted"])


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "twinstep"])
def test_a_setting_that_jax_refuses_is_one_line(command: str):
    with start(command, JAX_NUM_CPU_DEVICES="abc") as process:
        _, printed = process.communicate(timeout=120)
    assert process.returncode == 2
    assert len(printed.splitlines()) == 1, printed
    assert printed.startswith("error: ")
    assert printed.endswith("change or unset JAX_NUM_CPU_DEVICES=abc\n")


def test_the_instruments_replace_the_setting_with_their_own_number_or_refuse_it():
    """With --devices the variable is set by the command; without, what JAX says is one line."""
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "abc"}
    done = subprocess.run(
        [sys.executable, "-m", "twinstep", "collectives", "jax.numpy:sin"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "jax_num_cpu_devices" in done.stderr
