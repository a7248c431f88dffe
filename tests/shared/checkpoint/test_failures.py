"""Saves that fail, folders that are in use, disks without space: one line, and an end."""

import dataclasses
import errno
import logging
import shutil
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from shared.checkpoint import lock
from shared.checkpoint.errors import one_line, quiet
from shared.checkpoint.lock import locked
from shared.checkpoint.manifest import Manifest, saved_steps
from shared.checkpoint.writer import Writer
from tests.runs import train
from tests.shared.checkpoint.saved import build
from tests.small import small_config

MANIFEST = Manifest(0, small_config(), "text, 9 bytes", "a test", {})


def test_a_failed_save_names_its_step_and_leaves_no_thread(tmp_path: Path):
    """Python joins threads when it exits: one that waits for a directory that is never created holds up the end."""
    twin, folder = build("auto_sharding", 1), tmp_path / "checkpoints"
    state = twin.init(jax.random.key(0))
    before = set(threading.enumerate())

    def save() -> None:
        with Writer(folder, 2, MANIFEST) as writer:
            shutil.rmtree(folder)
            folder.touch()
            writer.save(2, state)

    with pytest.raises(
        ValueError,
        match=r"cannot save step 2 to .*: (Not a directory|No such file or directory) .*; no checkpoint is there yet$",
    ):
        save()
    end = time.monotonic() + 5
    while waiting := [thread for thread in set(threading.enumerate()) - before if not thread.daemon]:
        assert time.monotonic() < end, waiting
        time.sleep(0.05)


def test_a_save_that_fails_in_the_background_is_reported_as_its_own(tmp_path: Path):
    """Not as the next one, which finds it."""
    twin, folder = build("auto_sharding", 1), tmp_path / "checkpoints"
    state = twin.init(jax.random.key(0))

    def fail() -> None:
        raise ValueError(
            f"RESOURCE_EXHAUSTED: {'path ' * 99}: No space left on device [os_error_code='{errno.ENOSPC}']"
        )

    expected = r"cannot save step 2 to .*: No space left on device; the newest checkpoint there is that of step 1$"
    with Writer(folder, 2, MANIFEST) as writer:
        writer.save(1, state)
        writer.wait()
        writer.saved = 2  # as if it had been begun
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writer.manager, "wait_until_finished", fail)
            with pytest.raises(ValueError, match=expected):
                writer.save(3, state)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.EROFS, "text", "/folder/8"), "Read-only file system (/folder/8)"),
        (ValueError("DATA: long\npath [os_error_code='28']"), "No space left on device"),
        (ValueError("first\nsecond"), "first"),
        (ValueError(), "ValueError"),
        (ValueError("a" * 400 + "the end"), f"{'a' * 150} … {'a' * 143}the end"),
    ],
)
def test_one_line(error: Exception, line: str):
    assert one_line(error) == line
    wrapped = RuntimeError("while saving")
    wrapped.__cause__ = error
    if isinstance(error, OSError):
        assert one_line(wrapped) == line


def test_old_steps_and_unfinished_saves_make_room_before_training(tmp_path: Path):
    for name in ("1", "2", "3", "4.orbax-checkpoint-tmp", "damaged"):
        (tmp_path / name).mkdir()
    with Writer(tmp_path, 1, MANIFEST):
        assert saved_steps(tmp_path) == [3]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "damaged"]


def test_a_checkpoint_that_cannot_fit_is_found_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=10**6, free=10_000))
    monkeypatch.setattr("shared.cli.train.train", lambda *_: pytest.fail("training has begun"))
    with pytest.raises(
        ValueError, match=r"a checkpoint has [\d,]+ bytes, but .* only 10,000 bytes of free space; make"
    ):
        train(tmp_path, "--steps", 2, "--devices", 1)


def test_one_run_owns_a_folder(tmp_path: Path):
    """A second one is refused at once, with the first one's name, and does not touch anything."""
    notes: list[str] = []
    with locked(tmp_path / "checkpoints", notes.append):
        for _ in range(2):
            with pytest.raises(
                ValueError, match=r"checkpoints is in use by process \d+ on \S+, started [\d: -]+; wait"
            ):
                train(tmp_path, "--steps", 2, "--devices", 1, "--resume")
    assert not notes
    with locked(tmp_path / "checkpoints", notes.append):  # it is free again
        pass


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    notes: list[str] = []
    with locked(tmp_path, notes.append):
        assert notes == [
            f"warning: {tmp_path} cannot be locked (No locks available); make sure that no other run saves to it"
        ]


def test_what_is_silenced_while_saving_is_heard_afterwards(tmp_path: Path):
    """Also when the writer cannot be entered."""
    before = [sys.unraisablehook, *(logging.getLogger(name).level for name in ("absl", "asyncio"))]

    def now() -> list[object]:
        return [sys.unraisablehook, *(logging.getLogger(name).level for name in ("absl", "asyncio"))]

    with quiet():
        assert now() != before
    assert now() == before
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot write"):
        Writer(tmp_path / "file" / "below", 1, dataclasses.replace(MANIFEST)).__enter__()
    assert now() == before
