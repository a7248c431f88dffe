"""Texts to train on, as bytes: a file, Tiny Shakespeare, or the Python documentation that comes with Python."""

import logging
from pathlib import Path
from typing import Any

import numpy as np

from shared.config import InputError, check

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
CORPORA = ("python-docs", "tiny-shakespeare")
TIMEOUT_S = 10
"""Longest wait for an answer, or for more of it, from the server of a download."""


def read_file(path: Path) -> np.ndarray:
    """A file's bytes, (N,) uint8. Raises ValueError if it is missing, empty or not a readable file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"cannot read the text {path}: {reason}; give --data the path of a text file") from None
    check(len(data) > 0, f"the text {path} is empty; give --data a file with some text in it")
    return np.frombuffer(data, np.uint8)


def read_corpus(name: str, cache_dir: Path | None = None) -> np.ndarray:
    """A named corpus's bytes, (N,) uint8.

    `python-docs` is the text of Python's `help()` topics, always available; it differs between Python versions.
    `tiny-shakespeare` is read from `cache_dir` (by default the user's cache) or downloaded into it once, completely or
    not at all, and checked against its sha256. Raises ValueError for an unknown name, or if neither way works.
    """
    check(name in CORPORA, f"no corpus is called {name!r}; choose one of: {', '.join(CORPORA)}, or give --data FILE")
    if name == "python-docs":
        from pydoc_data.topics import topics

        text = "\n".join(topics[topic] for topic in sorted(topics))
        return np.frombuffer(text.encode(), np.uint8)
    return read_file(download_shakespeare(cache_dir))


def download_shakespeare(cache_dir: Path | None) -> Path:
    """Return the path of the cached file, which is downloaded if it is not there."""
    import pooch

    downloader: Any = pooch.HTTPDownloader(timeout=TIMEOUT_S)  # pooch's annotations do not fit one another
    folder = cache_dir or Path(pooch.os_cache("twinstep"))
    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return Path(
            pooch.retrieve(
                SHAKESPEARE_URL,
                known_hash=f"sha256:{SHAKESPEARE_SHA256}",
                fname="tinyshakespeare.txt",
                path=folder,
                downloader=downloader,
            )
        )
    except (OSError, ValueError) as error:  # no network (requests raises OSErrors), no place to write, wrong hash
        why = "the download is not the expected text" if isinstance(error, ValueError) else "it cannot be downloaded"
        raise InputError(
            f"tiny-shakespeare is not in {folder} and {why} ({type(error).__name__}); "
            "give --data FILE with a copy of it, or use --corpus python-docs"
        ) from None
    finally:
        logger.setLevel(level)


def hold_out_validation(text: np.ndarray, validation: float, window: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the text's beginning for training and its end, of this share, for validation.

    An end no longer than a window is too short to validate on: all of the text is then for training.
    """
    held_out = int(text.size * validation)
    return (text[:-held_out], text[-held_out:]) if held_out > window else (text, None)
