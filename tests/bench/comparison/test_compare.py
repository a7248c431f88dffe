"""The comparison command and its parts."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import explicit_shardmap
from bench import TWINS
from bench.comparison import compare
from bench.comparison.compare import CompareCommand
from bench.proof import prove
from bench.proof.programs import compiled_together
from bench.timing.timed_step import TimedStep, interleaved, median_ratio
from shared.config import Config
from shared.placement.traffic import predicted_traffic
from shared.twin import Twin
from tests.runs import COMPILED_ONCE
from tests.small import small_config


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch):
    """Two devices and one type, so that the whole command takes seconds. CI runs it in full."""
    monkeypatch.setattr(compare, "device_counts", lambda devices: [2])
    monkeypatch.setattr(compare, "DTYPES", ("float32",))
    monkeypatch.setattr(prove, "compiled", compiled_together)


def test_compare_end_to_end(quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "compare.json"
    code = compare.run(CompareCommand(config=small_config(), rounds=2, json=path))
    printed = capsys.readouterr().out
    assert code == 0, printed
    for expected in (
        "largest difference, float32",
        "worst gradient",
        "budget used by each gradient, on 2 devices",
        "verdict",
        "equal",
        "tokens [8, 8]",
        "replicated on every device",
    ):
        assert expected in printed
    data = json.loads(path.read_text())
    assert data["equal"] is True
    (row,) = data["rows"]
    assert set(row["proofs"]) == {"float32", "bfloat16", "trajectory, SGD", "trajectory, Adam (smoke)"}
    assert set(row["proofs"]["float32"]) == {
        *("oracle / single", "oracle / auto", "oracle / explicit", "single / auto", "single / explicit"),
        *("auto / explicit", "auto / again", "explicit / again"),
    }
    assert set(row["seconds"]) == {"auto", "explicit", "compute only"}
    assert all(value > 0 for value in row["seconds"].values())
    assert row["losses"]["auto"] == pytest.approx(row["losses"]["explicit"], rel=1e-4)
    assert {leaf["name"] for leaf in row["proofs"]["float32"]["single / auto"]["leaves"]} >= {
        "gradients.blocks.attention.key.bias",
        "parameters.output.kernel",
        "logits",
        "metrics.gradient_norm",
    }
    book = row["ledger"]
    assert book["as_predicted"] == {"auto": True, "explicit": True}
    for name, sends in book["compiled"].items():
        assert sum(c["total_bytes"] for c in sends) == sum(entry["bytes"] for entry in book["predicted"][name]) > 0


def test_a_difference_is_shown_and_is_the_exit_code(
    quick: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """A factor of 1.001 in the gradients of one twin."""

    def wrong(*arguments: Any) -> Twin:
        twin = explicit_shardmap.build(*arguments)

        def loss_and_grads(*arguments: Any) -> Any:
            loss, gradients, tokens = twin.loss_and_grads(*arguments)
            return loss, jax.tree.map(lambda leaf: leaf * 1.001, gradients), tokens

        return dataclasses.replace(twin, loss_and_grads=jax.jit(loss_and_grads))

    monkeypatch.setitem(TWINS, "explicit", wrong)
    monkeypatch.setattr(compare, "trajectories", lambda *arguments: {})
    assert compare.run(CompareCommand(config=small_config(), rounds=1)) == 1
    printed = capsys.readouterr().out
    assert "NOT EQUAL" in printed
    assert "gradients: 1.001 times the reference" in printed


def test_a_wrong_ledger_is_the_exit_code(
    quick: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Steps are equal, but one sends more than the strategy table predicts."""
    honest = predicted_traffic

    def too_little(config: Config, degrees: Any, twin: str) -> Any:
        return [entry._replace(bytes=entry.bytes - 4 * (twin == "auto")) for entry in honest(config, degrees, twin)]

    monkeypatch.setattr("bench.ledger.report.predicted_traffic", too_little)
    monkeypatch.setattr(compare, "prove_tiers", lambda *arguments: {2: {}})
    assert compare.run(CompareCommand(config=small_config(), rounds=1)) == 1
    assert "NOT AS PREDICTED" in capsys.readouterr().out


def test_errors_come_before_the_work(tmp_path: Path):
    with pytest.raises(ValueError, match="rounds is 0; give at least 1"):
        compare.run(CompareCommand(rounds=0))
    with pytest.raises(ValueError, match="give --json a path in a folder that exists"):
        compare.run(CompareCommand(json=tmp_path / "missing" / "file"))
    with pytest.raises(ValueError, match="batch=12 cannot be split evenly over"):
        compare.run(CompareCommand(config=dataclasses.replace(small_config(), batch=12)))


def test_turns_are_taken_in_rotation():
    ran = []

    class Noted(TimedStep):
        def run(self, steps: int = 1) -> None:
            ran.append((self.state, steps))

    timed_steps = {name: Noted(None, name, None) for name in "abc"}
    seconds = interleaved(timed_steps, rounds=3, steps=2)
    assert "".join(name for name, _ in ran) == "abcbcacab"
    assert {steps for _, steps in ran} == {2}
    assert {name: values.shape for name, values in seconds.items()} == dict.fromkeys("abc", (3,))


def test_a_ratio_is_the_median_of_ratios_within_rounds():
    """Noise that slows a whole round must not show."""
    assert median_ratio(np.array([2.0, 20.0, 3.0]), np.array([1.0, 10.0, 1.0])) == 2


def test_processes_end_to_end(tmp_path: Path):
    """Two processes that this starts itself: buckets send fewer arrays and as many bytes, and change no loss."""
    small = ["--layers", "1", "--d-model", "16", "--heads", "2", "--d-ff", "16", "--seq-len", "16", "--rounds", "1"]
    path = tmp_path / "processes.json"
    done = subprocess.run(
        [sys.executable, "-m", "bench", "processes", *small, "--json", str(path)],
        cwd=Path(__file__).parents[3],
        env={**os.environ, **COMPILED_ONCE},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert "2 cpu devices in 2 processes" in done.stdout
    rows = {row["step"]: row for row in json.loads(path.read_text())["rows"]}
    assert {name: row["arrays"] for name, row in rows.items()} == {
        "auto": 23, "explicit, in buckets": 1, "explicit, leaf by leaf": 23, "explicit, sending nothing": 0,
    }  # fmt: skip
    sent = {row["bytes"] for name, row in rows.items() if name != "explicit, sending nothing"}
    assert len(sent) == 1
    losses = [row["loss"] for name, row in rows.items() if name != "explicit, sending nothing"]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)
    bare = rows["explicit, sending nothing"]["seconds"]
    for row in rows.values():  # in a single round, the ratio within it is that of the fastest
        assert row["over_sending_nothing"] == pytest.approx(row["seconds"] / bare)
