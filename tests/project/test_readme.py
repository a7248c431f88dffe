"""The commands and programs in the README run, here or in CI, and the programs print what the README says."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PROGRAMS = [text for language, text in BLOCKS if language == "python"]
COMMANDS = [
    line for language, text in BLOCKS for line in text.splitlines() if re.match(r"(make|diff|\.venv/bin/python) ", line)
]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_there_is_something_to_test():
    assert len(PROGRAMS) == 3
    assert len(COMMANDS) == 17


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("make")])
def test_ci_runs_the_make_commands(command: str):
    """With its own interpreter, folder and, for a short run, arguments."""
    _, target, *arguments = command.split(maxsplit=2)
    lines = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if f"make {target} " in line]
    assert any(all(argument in line for argument in arguments) for line in lines)
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("command", [command for command in COMMANDS if " -m bench " in command])
def test_ci_runs_the_bench_commands(command: str):
    (line,) = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if "-m bench $command" in line]
    assert command.split(" -m bench ")[1] in shlex.split(line.split(" in ")[1].split(";")[0])


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("diff")])
def test_the_diffs_are_short(command: str):
    """Most of a twin's file stands in the other's too: what differs is worth reading."""
    done = run(*command.split())
    assert done.returncode == 1, done.stderr
    _, ours, _ = command.split()
    assert len(re.findall(r"^<", done.stdout, re.MULTILINE)) < 0.5 * len((ROOT / ours).read_text().splitlines())


def test_the_training_commands_print_the_same_losses(tmp_path: Path):
    printed = []
    for command in COMMANDS:
        if " train --steps 20" in command:
            _, *arguments = command.replace("metrics.jsonl", str(tmp_path / "metrics.jsonl")).split()
            done = run(sys.executable, *arguments)
            assert done.returncode == 0, done.stderr
            printed.append(re.findall(r"step .*perplexity \S+", done.stdout))
    assert len(printed) == 2
    assert len(printed[0]) == 12
    assert printed[0] == printed[1]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 22  # the run, 20 steps, an evaluation


def test_the_commands_on_checkpoints(tmp_path: Path):
    """In their order: train, inspect what was saved, generate from it, and save and restore once more."""
    printed = []
    for command in COMMANDS:
        if command.startswith(".venv") and not re.search(" train --steps 20| -m bench ", command):
            _, *arguments = shlex.split(command)
            folder = str(tmp_path / "checkpoints")
            done = run(sys.executable, *(folder if word == "checkpoints" else word for word in arguments))
            assert done.returncode == 0, done.stderr
            printed.append(done.stdout)
    _, inspected, generated, roundtrip = printed
    assert [line.split()[0] for line in inspected.splitlines()[1:4]] == ["10", "20", "30"]
    assert generated.startswith("The class ")
    assert "equal, bit for bit" in roundtrip


def test_the_explicit_step_is_quoted_as_it_stands():
    assert PROGRAMS[0] in (ROOT / "explicit_shardmap" / "step.py").read_text()


def test_the_users_own_step():
    """The wrong one is rejected with the README's message, and the right one passes."""
    done = run(sys.executable, "-c", PROGRAMS[1])
    assert done.returncode == 1
    message = done.stderr[done.stderr.index("AssertionError") :]
    assert message.rstrip() in README
    begin = 'def by_hand(params, x):\n    return {"gradients": lax.pmean('
    assert begin in PROGRAMS[1]
    right = begin.replace("    return", '    params = lax.pcast(params, "data", to="varying")\n    return')
    done = run(sys.executable, "-c", PROGRAMS[1].replace(begin, right))
    assert done.returncode == 0, done.stderr


def test_the_ledger():
    done = run(sys.executable, "-c", PROGRAMS[2])
    assert done.returncode == 0, done.stderr
    assert f"```\n{done.stdout}```" in README
