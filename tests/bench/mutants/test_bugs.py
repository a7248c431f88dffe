"""The proof catches every planted bug, by itself, and says what it is; and it takes nothing correct for a bug."""

import dataclasses
import re

import pytest

import explicit_shardmap
from bench import TWINS
from bench.mutants import bugs
from bench.mutants.bugs import BUGS, BugsCommand, Finding, examine, examine_bug
from bench.mutants.planted import Bug, Edit, planted
from shared.placement.strategies import STRATEGIES

QUICK = ("no pmean", "a wrong learning-rate step after resuming", "the gather's missing 1/n")
ALL = [pytest.param(bug, id=bug.name, marks=() if bug.name in QUICK else pytest.mark.slow) for bug in BUGS]


@pytest.mark.parametrize("bug", ALL)
def test_it_is_caught_and_named(bug: Bug):
    finding = examine_bug(bug)
    assert finding.tier, "no check has caught it"
    assert finding.explains(bug), finding.message


@pytest.mark.parametrize("twin", TWINS)
def test_a_correct_step_is_left_alone(twin: str):
    for strategy, devices in (("data_parallel", 2), ("fsdp_context_tensor", 4)):
        finding = examine("none", twin, TWINS[twin], strategy, devices)
        assert not finding.tier, finding.message


def test_the_command_shows_the_table_and_fails_for_a_bug_that_is_not_caught(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    harmless = Bug(
        "harmless",
        "explicit",
        says="anything",
        edits=(Edit("step.py", "summed_loss(params: optax.Params, ", "summed_loss( params: optax.Params, "),),
    )
    monkeypatch.setattr(bugs, "BUGS", (BUGS[1], harmless))
    monkeypatch.setattr(bugs, "TWINS", {})
    assert bugs.run(BugsCommand()) == 1
    printed = capsys.readouterr().out
    assert "psum for pmean" in printed
    assert re.search(r"harmless .*nothing: WRONG", printed)


def test_a_message_without_the_cause_does_not_count():
    bug = BUGS[1]
    finding = Finding(bug.name, bug.twin, 2, "float32", "", "gradients.output.kernel differs")
    assert not finding.explains(bug)


def test_planting_fails_when_the_source_has_changed_and_leaves_nothing_behind():
    before = explicit_shardmap.build, dict(STRATEGIES)
    stale = dataclasses.replace(BUGS[0], edits=(Edit("step.py", "a line that is not there", ""),))
    with pytest.raises(ValueError, match="no longer has, once: a line that is not there"), planted(stale):
        pass
    with planted(BUGS[0]) as build:
        assert build is not before[0]
    import explicit_shardmap as again

    assert (again.build, dict(STRATEGIES)) == before
