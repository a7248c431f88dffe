"""Texts: where they come from, and what is reported when they are not available."""

import functools
import hashlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shared.data import corpus
from shared.data.corpus import hold_out_validation, read_corpus, read_file

TEXT = b"First Citizen:\nBefore we proceed any further, hear me speak.\n"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """A web server on loopback with TEXT in it."""
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "input.txt").write_bytes(TEXT)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}/input.txt"
        running.shutdown()


def test_the_built_in_text_is_text():
    text = read_corpus("python-docs")
    assert text.dtype == np.uint8
    assert text.size > 300_000
    assert b"The" in text.tobytes()


def test_tiny_shakespeare_is_downloaded_once_and_checked(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(corpus, "SHAKESPEARE_URL", server)
    monkeypatch.setattr(corpus, "SHAKESPEARE_SHA256", hashlib.sha256(TEXT).hexdigest())
    assert read_corpus("tiny-shakespeare", tmp_path / "cache").tobytes() == TEXT
    monkeypatch.setattr(corpus, "SHAKESPEARE_URL", "http://127.0.0.1:9/gone")  # from the cache now
    assert read_corpus("tiny-shakespeare", tmp_path / "cache").tobytes() == TEXT


def test_another_text_than_expected_is_refused_and_not_kept(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(corpus, "SHAKESPEARE_URL", server)
    with pytest.raises(ValueError, match="the download is not the expected text"):
        read_corpus("tiny-shakespeare", tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*"))


def test_without_a_network_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(corpus, "SHAKESPEARE_URL", "http://127.0.0.1:9/input.txt")  # nothing listens there
    with pytest.raises(ValueError, match="give --data FILE with a copy of it, or use --corpus python-docs"):
        read_corpus("tiny-shakespeare", tmp_path)


def test_a_server_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(corpus, "SHAKESPEARE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/input.txt")
        monkeypatch.setattr(corpus, "TIMEOUT_S", 0.2)
        with pytest.raises(ValueError, match="cannot be downloaded"):
            read_corpus("tiny-shakespeare", tmp_path)


def test_the_real_text_has_the_expected_hash():
    """Where a copy of Tiny Shakespeare lies beside the project, it is the one that the download is checked against."""
    path = Path(__file__).parents[4] / "shared" / "data" / "tinyshakespeare.txt"
    if not path.exists():
        pytest.skip("no copy of Tiny Shakespeare beside the project")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == corpus.SHAKESPEARE_SHA256


def test_unknown_missing_and_empty(tmp_path: Path):
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="no corpus is called 'bible'; choose one of: python-docs, tiny-shakespeare"):
        read_corpus("bible")
    with pytest.raises(ValueError, match="No such file or directory; give --data the path of a text file"):
        read_file(tmp_path / "missing")
    with pytest.raises(ValueError, match="is empty; give --data a file with some text in it"):
        read_file(tmp_path / "empty")
    with pytest.raises(ValueError, match="Is a directory"):
        read_file(tmp_path)


def test_the_end_of_a_text_is_held_out():
    text = np.arange(100, dtype=np.uint8)
    training, validation = hold_out_validation(text, 0.2, window=8)
    np.testing.assert_array_equal(np.concatenate([training, validation]), text)
    assert validation.size == 20
    assert hold_out_validation(text, 0.05, window=8)[1] is None
    assert hold_out_validation(text, 0.0, window=8)[0].size == 100
