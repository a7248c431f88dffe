"""Profiles: of the requested steps, with time counted once."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from shared.training.profiling import COLLECTIVE, Profile, own_times
from tests.runs import train


def event(name: str, start: float, duration: float, operation: bool = True) -> SimpleNamespace:
    stats = [("hlo_op", name)] if operation else [("other", 1)]
    return SimpleNamespace(name=name, start_ns=start, duration_ns=duration, stats=stats)


def test_a_loop_is_not_counted_twice():
    events = [
        event("while.1", 0, 100),
        event("all-reduce.2", 10, 30),
        event("fusion.3", 40, 20),
        event("call.4", 60, 20),
        event("fusion.3", 65, 10),
        event("ThunkExecutor", 0, 500, operation=False),
        event("fusion.3", 100, 7),
    ]
    found = own_times(reversed(events))
    assert found == {"while.1": 30, "all-reduce.2": 30, "fusion.3": 37, "call.4": 10}
    assert sum(found.values()) == 107


@pytest.mark.parametrize(
    "name", ["all-reduce.1", "psum_invariant.3", "all-gather-start", "ppermute.2", "reduce-scatter"]
)
def test_names_of_collectives(name: str):
    assert COLLECTIVE.search(name)
    assert not COLLECTIVE.search("reduce-window.1 fusion.2 gather.3 scatter.4")


def test_a_run_is_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = ["--steps", 6, "--devices", 4, "--profile", tmp_path / "profile"]
    assert train(tmp_path / "run", *options, twin="explicit_shardmap") == 0
    line = re.search(
        r"profile of steps 3 to 5 in .*: (\d+)% of the devices' busy time is coll", capsys.readouterr().out
    )
    assert line
    assert 0 < int(line.group(1)) < 100
    assert len(list((tmp_path / "profile").rglob("*.xplane.pb"))) == 1


def test_bad_input(tmp_path: Path):
    with pytest.raises(ValueError, match="steps is 4; --profile needs at least 5"):
        train(tmp_path, "--steps", 4, "--profile", tmp_path / "profile")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot write a profile to .*; give --profile a folder to write to"):
        Profile(tmp_path / "file" / "below", 0)
