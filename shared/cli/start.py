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
    own import, or be reported from a C callback and lost. Any other ValueError passes.
    """
    before = signal.signal(signal.SIGINT, end_interrupted)
    try:
        yield
    except ValueError as error:  # JAX reads its environment variables on import
        reason = " ".join(str(error).split())
        settings = quoted_settings(reason)
        if not settings:
            raise
        print(f"error: {reason}; change or unset {', '.join(settings)}", file=sys.stderr)
        sys.exit(2)
    finally:
        signal.signal(signal.SIGINT, before)


def end_interrupted(number: int, frame: FrameType | None) -> NoReturn:
    """End this process at once."""
    os.write(2, b"interrupted\n")
    os._exit(130)


def quoted_settings(reason: str) -> list[str]:
    """Return NAME=VALUE of JAX's environment variables that a reason quotes: by name, or else by value."""
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith("JAX_") and value}
    named = [name for name in settings if name.lower() in reason.lower()]
    return [f"{name}={settings[name]}" for name in named or settings if named or settings[name] in reason]
