"""What a page can ask for: quoted sources, and what commands and programs print.

A passage is of one of three kinds. By default it is the same in every run (a quoted source, bytes, counts, messages),
and a check compares it exactly. One that `varies` (times, losses to the last digit) is never a failure: the check
reports how far it has drifted. One that is `slow` (more than half a minute) is made only if all commands are run, and
one that `downloads` only where pages are written, since a check must not depend on a network.
"""

import ast
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from bench.docs.drift import drift

ROOT = Path(__file__).parents[2]
PYTHON = ".venv/bin/python"
"""What the pages call the interpreter; commands are run with the present one."""

SETTINGS = ("XLA_", "JAX_", "MAKE", "MFLAGS", "COLUMNS", "ARGS", "RESULTS", "VENV")
"""What the environment's names begin with that would change outputs; `make ARGS=...` hands its variables on there."""

Commands = Literal["all", "quick", "none"]


class NotRun(Exception):
    """A passage needs a command that is not to be run."""


class Passages:
    """Makes the passages of pages, one after the other. A context: commands run in a scratch copy of the root.

    The copy consists of links, so that sources are named as in the repository and what a command writes, such as
    checkpoints, is there for the next command and gone afterwards.
    """

    def __init__(self, *, write: bool, commands: Commands = "all") -> None:
        self.write, self.commands = write, commands
        self.made = self.left = 0
        self.outputs: dict[str, str] = {}
        self.scratch = tempfile.TemporaryDirectory()

    def __enter__(self) -> "Passages":
        for entry in ROOT.iterdir():
            if not entry.name.startswith((".git", ".venv", "results")):
                (Path(self.scratch.name) / entry.name).symlink_to(entry)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.scratch.cleanup()

    def functions(self, cog: Any) -> Mapping[str, Callable[..., None]]:
        """The functions for a page, which `cog`, its module, is at."""

        def writing(make: Callable[..., str]) -> Callable[..., None]:
            def function(
                *arguments: Any, varies: bool = False, slow: bool = False, downloads: bool = False, **options: Any
            ) -> None:
                try:
                    if ((slow or downloads) and self.commands != "all") or (downloads and not self.write):
                        raise NotRun
                    passage = f"\n{make(Path(cog.inFile), cog.firstLineNum, *arguments, **options)}\n"
                except NotRun:
                    self.left += 1
                    cog.out(cog.previous)
                    return
                self.made += 1
                if varies and (report := drift(cog.previous, passage)):
                    cog.msg(f"{os.path.relpath(cog.inFile, ROOT)}:{cog.firstLineNum} drifted: {report}")
                cog.out(cog.previous if varies and not self.write else passage)

            return function

        makers = (self.source, self.excerpt, self.columns, self.run, self.runs, self.program, self.table)
        return {make.__name__: writing(make) for make in makers}

    def source(self, page: Path, line: int, file: str, *names: str) -> str:
        """The file, or its functions and classes of these names, as they stand, below a link to it."""
        return f"{self.caption(page, file)}\n\n{fenced(quoted(file, *names), 'python')}"

    def excerpt(self, page: Path, line: int, file: str, begin: str, end: str) -> str:
        """The lines from the first that begins with `begin` to the next that begins with `end`, dedented."""
        lines = (ROOT / file).read_text().splitlines()
        first = next((n for n, text in enumerate(lines) if text.strip().startswith(begin)), None)
        last = next((n for n, text in enumerate(lines) if text.strip().startswith(end) and n >= (first or 0)), None)
        if first is None or last is None:
            raise ValueError(f"{file} has no lines from {begin!r} to {end!r}")
        text = textwrap.dedent("\n".join(lines[first : last + 1]))
        return f"{self.caption(page, file)}\n\n{fenced(text, 'python')}"

    def columns(self, page: Path, line: int, left: str, right: str, below: str = "") -> str:
        """Two files beside each other in an HTML table; below them, a row of what the program `below` prints of each.

        below: a program (of `quoted` source text) that prints one line for each file, in this order.
        """
        files = (left, right)
        cells = [f"{self.caption(page, file)}\n\n{fenced(quoted(file), 'python')}" for file in files]
        rows = [cells]
        if below:
            printed = self.output([sys.executable, "-c", below], name="the program below the columns").splitlines()
            rows.append([fenced(text) for text in printed])
        return table_of(rows)

    def run(
        self, page: Path, line: int, command: str, *, fails: bool = False, killed_after: str = "", **cut: Any
    ) -> str:
        """A command and what it prints. cut: see `cut_out`. fails: whether its exit code is to be another than 0.

        killed_after: pattern of a line after which the command is killed with `kill -9`.
        """
        if killed_after:
            text = f"{cut_out(self.killed(real(command), killed_after), **cut)}\nKilled"
        else:
            text = cut_out(self.output(real(command), name=command, fails=fails), **cut)
        return fenced(f"$ {as_quoted(command)}\n{text}")

    def runs(self, page: Path, line: int, *commands: str) -> str:
        """Commands without their output; each must succeed."""
        for command in commands:
            self.output(real(command), name=command)
        return fenced("\n".join(map(as_quoted, commands)))

    def program(
        self, page: Path, line: int, *, replace: Mapping[str, str] | None = None, fails: bool = False, **cut: Any
    ) -> str:
        """What the block of Python above prints. replace: texts in it to others, before it is run."""
        above = "".join(page.read_text().splitlines(keepends=True)[: line - 1])
        code = re.findall(r"^```python\n(.*?)^```$", above, re.MULTILINE | re.DOTALL)[-1]
        for old, new in (replace or {}).items():
            if old not in code:
                raise ValueError(f"the program above {page.name}:{line} has no text {old!r} to replace")
            code = code.replace(old, new)
        (Path(self.scratch.name) / "program.py").write_text(code)  # a file, so that messages can name its lines
        command = [sys.executable, "program.py"]
        return fenced(cut_out(self.output(command, code, name=f"{page.name}:{line}", fails=fails), **cut))

    def table(self, page: Path, line: int, headings: list[str], rows: list[list[str]]) -> str:
        """A table of Markdown."""
        lines = [headings, ["---"] * len(headings), *rows]
        return "".join(f"| {' | '.join(map(str, cells))} |\n" for cells in lines)

    def caption(self, page: Path, file: str) -> str:
        return f"[`{file}`]({os.path.relpath(ROOT / file, page.parent)})"

    def output(self, command: list[str], code: str = "", *, name: str, fails: bool = False) -> str:
        """What a command prints; the same command (with the same code in its file) is run only once.

        Raises ValueError for an unexpected exit code.
        """
        if self.commands == "none":
            raise NotRun
        key = shlex.join(command) + code
        if key not in self.outputs:
            done = subprocess.Popen(command, **self.settings())
            printed, _ = done.communicate()
            if (done.returncode != 0) != fails:
                raise ValueError(f"{name} ended with exit code {done.returncode}:\n{printed}")
            self.outputs[key] = printed
        return self.outputs[key]

    def killed(self, command: list[str], after: str) -> str:
        """What a command prints up to the line with this pattern, at which it is killed."""
        if self.commands == "none":
            raise NotRun
        lines = []
        with subprocess.Popen(command, **self.settings()) as process:
            for line in process.stdout or ():
                lines.append(line)
                if re.search(after, line):
                    process.kill()
                    return "".join(lines)
        raise ValueError(f"{shlex.join(command)} ended before it printed {after!r}:\n{''.join(lines)}")

    def settings(self) -> dict[str, Any]:
        """Of subprocesses: in the scratch folder, without settings of the present shell that would change outputs."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(SETTINGS)}
        path = os.pathsep.join(filter(None, (self.scratch.name, os.environ.get("PYTHONPATH"))))
        return {
            "cwd": self.scratch.name,
            "env": clean | {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
        }


def quoted(file: str, *names: str) -> str:
    """The text of a file, or of its functions and classes of these names with what decorates them."""
    text = (ROOT / file).read_text()
    if not names:
        return text
    lines, found = text.splitlines(), {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    if missing := [name for name in names if name not in found]:
        raise ValueError(f"{file} has no {', '.join(missing)}; it has {', '.join(found)}")
    return "\n\n\n".join(found[name] for name in names)


def real(command: str) -> list[str]:
    """The command of a page as it is run here: with this interpreter, whose packages `make` is to leave alone."""
    first, *rest = shlex.split(command)
    if first == "python":
        return [sys.executable, *rest]
    if first == "make":
        return ["make", "--silent", f"--old-file={sys.prefix}/ready", f"VENV={sys.prefix}", *rest]
    return [first, *rest]


def as_quoted(command: str) -> str:
    return re.sub("^python ", f"{PYTHON} ", command)


def cut_out(text: str, begin: str = "", end: str = "", only: str = "") -> str:
    """The part of an output that a page shows.

    begin: pattern of the first line shown. end: of the first line after it that is not. only: of the lines shown.
    Raises ValueError if nothing is left.
    """
    lines = [line.rstrip() for line in text.splitlines()]
    if begin:
        lines = lines[next((n for n, line in enumerate(lines) if re.search(begin, line)), len(lines)) :]
    if end:
        lines = lines[: next((n for n, line in enumerate(lines) if n and re.search(end, line)), len(lines))]
    if only:
        lines = [line for line in lines if re.search(only, line)]
    if not any(lines):
        raise ValueError(f"nothing is left of this output by begin={begin!r}, end={end!r}, only={only!r}:\n{text}")
    return "\n".join(lines)


def fenced(text: str, language: str = "") -> str:
    return f"```{language}\n{text.strip(chr(10))}\n```\n"


def table_of(rows: list[list[str]]) -> str:
    """An HTML table whose cells are Markdown."""
    cells = ["".join(f"<td>\n\n{cell}\n</td>" for cell in row) for row in rows]
    return "<table>\n" + "".join(f"<tr>{row}</tr>\n" for row in cells) + "</table>\n"
