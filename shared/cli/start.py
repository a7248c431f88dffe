"""The first seconds of a command line: what can go wrong while JAX and the rest are imported.

Imports nothing but the standard library, so that it is in force before anything slow is.
"""

import os
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


@contextmanager
def importing() -> Generator[None]:
    """Context for imports: Ctrl-C ends the process with one word and 130, a setting that JAX refuses with a line and 2.

    The interrupt ends the process within its handler: an exception could be caught by a library in the middle of its
    own import, or be reported from a C callback and lost. It stays so after the imports, until `hand_over`: between the
    two nothing would catch the exception. Any other ValueError passes.
    """
    # A shell ignores the interrupt for a background job, and it stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_interrupted)
    try:
        yield
    except ValueError as error:  # JAX reads its environment variables on import
        reason = " ".join(str(error).split())
        settings = quoted_settings(reason)
        if not settings:
            raise
        print(f"error: {reason}; change or unset {', '.join(settings)}", file=sys.stderr)
        sys.exit(2)


def hand_over() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again; to be called where that is caught. Leaves a handler of others alone."""
    if signal.getsignal(signal.SIGINT) is end_interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end_interrupted(number: int, frame: FrameType | None) -> NoReturn:
    """End this process at once."""
    os.write(2, b"interrupted\n")
    os._exit(130)


def quoted_settings(reason: str) -> list[str]:
    """Return NAME=VALUE of JAX's environment variables that a reason quotes: by name, or else by value."""
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith("JAX_") and value}
    named = [name for name in settings if name.lower() in reason.lower()]
    quoted = named or [name for name in settings if settings[name] in reason]
    return [f"{name}={settings[name]}" for name in quoted]
