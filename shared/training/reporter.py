"""What a run reports: a bar on a terminal, a line at intervals, and every record as a line of JSON."""

import dataclasses
import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shared.config import InputError, check
from shared.training.loop import Record


def open_output(path: Path, flag: str, *, append: bool = False) -> TextIO:
    """Open a file to write to, before any long work. Raises ValueError naming the flag that gave the path.

    A file that holds anything but lines of JSON is not overwritten: the path is probably a mistake. append: keep the
    lines that are there, except a last one that a killed run left unfinished.
    """
    try:
        content = path.read_bytes() if path.is_file() else b""
        check(
            not content or content.startswith(b"{"),
            f"{path} is not a file of JSON lines, and {flag} would overwrite it; give {flag} another path",
        )
        file = path.open("a" if append else "w")
        if append and content:
            file.truncate(content.rfind(b"\n") + 1)
        return file
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; give {flag} a path in a folder that exists") from None


class Reporter:
    """Prints the records of steps `first` to `last`, and writes them to a file if there is one."""

    def __init__(self, stack: ExitStack, console: Console, file: TextIO | None, first: int, last: int):
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[shown]}"),
        )
        self.bar = stack.enter_context(
            Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        )
        self.task = self.bar.add_task("train", total=last, completed=first - 1, shown="compiling")
        self.console, self.file, self.first, self.last = console, file, first, last

    def __call__(self, record: Record) -> None:
        """Report one training step."""
        self.write(dataclasses.asdict(record))
        line = (
            f"loss {record.loss:.4f}  perplexity {record.perplexity:.2f}  gradient norm {record.gradient_norm:.3f}"
            + (f"  {record.tokens_per_second:,.0f} tokens/s" if record.tokens_per_second else "")
        )
        self.bar.update(self.task, completed=record.step, shown=line)
        if record.step in (self.first, self.last) or record.step % max(self.last // 10, 1) == 0:
            self.print_line(record.step, line)

    def validation(self, step: int, loss: float, windows: int) -> None:
        """Report one evaluation."""
        perplexity = math.exp(min(loss, 700))
        self.write({"step": step, "validation_loss": loss, "validation_perplexity": perplexity, "windows": windows})
        self.print_line(step, f"validation loss {loss:.4f}  perplexity {perplexity:.2f}  over {windows} windows")

    def print_line(self, step: int, line: str) -> None:
        """Print a line about a step."""
        self.console.print(f"step {step:>{len(str(self.last))}}  {line}")

    def write(self, values: Mapping[str, Any]) -> None:
        """Write a line of JSON, in which numbers that are not finite are null."""
        if self.file:
            plain = {name: None if unwritable(value) else value for name, value in values.items()}
            print(json.dumps(plain, allow_nan=False, default=str), file=self.file, flush=True)


def unwritable(value: Any) -> bool:
    """Whether it is a number that JSON cannot represent."""
    return isinstance(value, float) and not math.isfinite(value)
