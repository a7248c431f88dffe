"""`assert_collectives`: what a step sends as a part of its tests, and what the failures say."""

import json
from pathlib import Path
from typing import Any

import jax
import pytest
from jax import lax

from tests.twinstep.communication.steps import X, mapped, reduced, two_by_four
from twinstep import assert_collectives

LINE = r"tests/twinstep/communication/(steps|test_expected)\.py:\d+"


@pytest.fixture(scope="module")
def step() -> Any:
    """Compiled: one all_reduce over tensor, 64 bytes."""
    return mapped(reduced).lower(X).compile()


@pytest.fixture(scope="module")
def larger() -> Any:
    """Compiled: the same, and an all_gather over data."""
    return mapped(lambda x: reduced(x) + lax.all_gather(x, "data").sum(0)).lower(X).compile()


@pytest.mark.parametrize(
    "expected",
    [
        {"tensor": {"all_reduce": 64}},
        {("tensor",): {"all_reduce": {"bytes": 64, "count": 1}}, "data": "none"},
        {"tensor": {"all_reduce": {"count": 1}, "all_gather": "none"}},
        {"tensor": "any"},
    ],
)
def test_what_is_sent_passes(step: Any, expected: Any):
    (found,) = assert_collectives(step, expected=expected, mesh=two_by_four())
    assert found.bytes == 64


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ("none", rf"an all_reduce over tensor appeared: 64 bytes in 1 run\n  1 x 64 bytes of 1 array, source {LINE}"),
        ({}, "an all_reduce over tensor appeared"),
        (
            {"data": {"all_reduce": 64}},
            "appeared: 64 bytes in 1 run(.|\n)*all_reduce over data: none, but 64 bytes exp",
        ),
        ({"tensor": {"all_reduce": 32}}, "all_reduce over tensor: 64 bytes in 1 run, but 32 bytes expected"),
        ({"tensor": {"all_reduce": {"count": 2}}}, "but 2 runs expected"),
        ({"tensor": "none"}, "an all_reduce over tensor appeared"),
    ],
)
def test_what_is_not_as_expected_fails(step: Any, expected: Any, message: str):
    with pytest.raises(AssertionError, match=message):
        assert_collectives(step, expected=expected, mesh=two_by_four())


@pytest.mark.parametrize("expected", [{"tensor": 64}, {"tensor": {"all_reduce": {"byte": 64}}}, 5])
def test_an_expectation_that_is_not_understood(step: Any, expected: Any):
    with pytest.raises(ValueError, match="give "):
        assert_collectives(step, expected=expected, mesh=two_by_four())


def test_nothing_is_sent_on_one_device():
    assert assert_collectives(jax.jit(lambda x: x.sum()), X, expected="none") == []


def test_a_snapshot(step: Any, larger: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Written only when told to; then compared; a new collective is named by its line, an old one is not."""
    path, mesh = tmp_path / "snapshots" / "step.json", two_by_four()
    with pytest.raises(AssertionError, match=r"there is no snapshot .*step\.json; write it with --twinstep-update"):
        assert_collectives(step, expected=path, mesh=mesh)
    assert not path.exists()
    assert_collectives(step, expected=path, mesh=mesh, update=True)
    assert_collectives(step, expected=str(path), mesh=mesh)
    written = json.loads(path.read_text())
    assert written["mesh"] == {"data": 2, "tensor": 4}
    assert written["collectives"]["tensor"]["all_reduce"]["bytes"] == 64
    with pytest.raises(
        AssertionError, match=rf"an all_gather over data appeared: 64 bytes.*\n.*source {LINE}"
    ) as failure:
        assert_collectives(larger, expected=path, mesh=mesh)
    assert "all_reduce" not in str(failure.value)
    monkeypatch.setenv("TWINSTEP_UPDATE", "1")
    assert_collectives(larger, expected=path, mesh=mesh)
    monkeypatch.delenv("TWINSTEP_UPDATE")
    assert_collectives(larger, expected=path, mesh=mesh)
    with pytest.raises(AssertionError, match="all_gather over data: none, but 64 bytes in 1 run expected"):
        assert_collectives(step, expected=path, mesh=mesh)
    assert [file.name for file in path.parent.iterdir()] == ["step.json"]


def test_a_grown_collective_names_the_new_line(tmp_path: Path):
    path = tmp_path / "step.json"
    assert_collectives(mapped(reduced), X, expected=path, update=True)
    with pytest.raises(AssertionError, match="all_reduce over tensor: 128 bytes in 2 runs, but 64 bytes in 1 run") as e:
        assert_collectives(mapped(lambda x: lax.psum(reduced(x) ** 2, "tensor") * x), X, expected=path)
    assert "  new: 1 x 64 bytes of 1 array, source tests/twinstep/communication/test_expected.py:" in str(e.value)
    assert "steps.py" not in str(e.value)


def test_a_snapshot_of_another_mesh_or_none(step: Any, tmp_path: Path):
    path = tmp_path / "step.json"
    assert_collectives(step, expected=path, mesh=two_by_four(), update=True)
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "platform": "gpu"}))
    with pytest.raises(AssertionError, match="the snapshot is of platform gpu, but this step of platform cpu"):
        assert_collectives(step, expected=path, mesh=two_by_four())
    path.write_text("{}")
    with pytest.raises(ValueError, match="is no snapshot of collectives"):
        assert_collectives(step, expected=path, mesh=two_by_four())


def test_branches_and_unknown_loops_are_ranges(tmp_path: Path):
    def step(x: jax.Array) -> jax.Array:
        x = lax.cond(x[0, 0] > 0, reduced, lambda x: x, x)
        return lax.while_loop(lambda x: x[0, 0] < 5, lambda x: lax.ppermute(x, "tensor", [(0, 1), (1, 0)]) + 1, x)

    path = tmp_path / "step.json"
    assert_collectives(mapped(step), X, expected=path, update=True)
    data = json.loads(path.read_text())["collectives"]
    assert data["tensor"]["all_reduce"]["bytes"] == [0, 64]
    assert data["other groups"]["collective_permute"]["bytes"] == [0, None]
    assert_collectives(mapped(step), X, expected=path)
    with pytest.raises(
        AssertionError, match="all_reduce over tensor: 0 to 64 bytes in 0 to 1 runs, but 64 bytes expected"
    ):
        assert_collectives(mapped(step), X, expected={"tensor": {"all_reduce": 64}, "other groups": "any"})
