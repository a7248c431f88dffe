"""Errors of Orbax and TensorStore in one line, and their logs silenced while they work."""

import logging
import os
import re
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

from shared.config import InputError
from shared.runtime import processes

LOGGERS = ("absl", "asyncio")


@contextmanager
def quiet() -> Generator[None]:
    """Silence what Orbax and TensorStore print besides the errors they raise; undone on leaving.

    They log every step, and every error once per array. After a failed save, TensorStore still calls into the event
    loop that Orbax has closed, which Python reports as an unraisable error.
    """
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    hook = sys.unraisablehook

    def report(unraisable: Any) -> None:
        if "Event loop is closed" not in str(unraisable.exc_value):
            hook(unraisable)

    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    sys.unraisablehook = report
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def as_input_error(what: str, remedy: str) -> Generator[None]:
    """Turn any exception but the loss of another process into an InputError of one line."""
    try:
        yield
    except Exception as error:
        if processes.is_loss(error):
            raise
        raise InputError(f"{what}: {one_line(error)}; {remedy}") from None


def one_line(error: BaseException) -> str:
    """Return the operating system's reason for an error if it has one, else the first line of its message."""
    for cause in chain(error):
        if isinstance(cause, OSError) and cause.errno:
            return os.strerror(cause.errno) + (f" ({cause.filename})" if cause.filename else "")
        if found := re.search(r"os_error_code='(\d+)'", str(cause)):  # TensorStore, at the end of a long message
            return os.strerror(int(found.group(1)))
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return first if len(first) < 300 else f"{first[:150]} … {first[-150:]}"


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error, its cause, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
