"""`python -m bench bugs`: would the proof notice? It is tried on steps with a known mistake in them.

Every planted bug (bench/*_bugs.py) must be caught by the comparison with the single-device step, with a differing
leaf and the likely cause in its message; and the same comparison must find nothing wrong with the steps as they are.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import TWINS
from bench.mutants import data_parallel, model_parallel
from bench.mutants.planted import Bug, planted
from bench.proof.programs import compiled_together, computing_in
from bench.proof.prove import Truth, proof_config, truth
from bench.proof.trajectories import (
    Course,
    compare_trajectories,
    compiled_once,
    single_course,
    trajectory,
    trajectory_config,
)
from shared.config import Config
from shared.placement.mesh import make_mesh
from shared.runtime import startup
from shared.training.reporter import open_output
from twinstep.equivalence.report import Report

BUGS = (*data_parallel.BUGS, *model_parallel.BUGS)


@dataclass(frozen=True)
class BugsCommand:
    """Plant known mistakes in both twins and show what the proof says of each."""

    json: Path | None = None
    """File for all that was found, as JSON."""


@dataclass(frozen=True)
class Finding:
    """What the check found in one step."""

    name: str
    twin: str
    devices: int
    tier: str
    """The first tier that caught something; empty if none did."""
    figure: str
    message: str

    def explains(self, bug: Bug) -> bool:
        """Whether the message has the leaf and the likely cause."""
        return all(re.search(expected, self.message) for expected in (bug.leaf, bug.says))


def small(config: Config) -> Config:
    """With one block and fewer rows, as many steps are compiled."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, layers=1), batch=8)


@functools.cache
def small_truth() -> Truth:
    """What all of them have to give."""
    return truth(small(proof_config("float32", "data_parallel")))


@functools.cache
def small_course() -> Course:
    """The single-device step's trajectory."""
    return single_course(small(trajectory_config("sgd", "data_parallel")))


def tiers(build: Callable[..., Any], strategy: str, devices: int, mesh: str = "") -> Iterator[tuple[str, Report]]:
    """The comparison of one step with the truth, tier by tier."""
    true = small_truth()
    places = make_mesh(strategy, devices, mesh)

    def built(config: Config) -> Any:
        return build(dataclasses.replace(small(config), strategy=strategy, mesh=mesh), places)

    with computing_in("float32"):
        twin = built(true.config)
        state, batch = twin.place_state(true.state), twin.place_batch(true.batch)
        programs = compiled_together(twin, state, batch)
        results = {**true.results, "first": programs.observe(state, batch, twin.place_state)}
        yield "float32", true.compare(results, ("single", "first"), suspects=true.suspects(places))
        results["again"] = programs.observe(state, batch, twin.place_state)
        yield "repeated run", true.compare(results, ("first", "again"), relative=0)
        config = small(trajectory_config("sgd", "data_parallel"))
        twin = built(config)
        found = trajectory(compiled_once(twin.train_step), config, twin.place_state, twin.place_batch)
        yield "trajectory", compare_trajectories(config, small_course(), found)


def examine(name: str, twin: str, build: Callable[..., Any], strategy: str, devices: int, mesh: str = "") -> Finding:
    """The first tier in which something differs, and what it says."""
    for tier, report in tiers(build, strategy, devices, mesh):
        if report.equal:
            continue
        failed = [leaf for leaf in report.leaves if not leaf.equal]
        if not failed:
            return Finding(name, twin, devices, "replicas", f"{len(report.problems)} leaves", str(report))
        worst = max(failed, key=lambda leaf: leaf.error)
        return Finding(name, twin, devices, tier, f"{worst.error:.1e}, {worst.tolerance:.1e} allowed", str(report))
    return Finding(name, twin, devices, "", "", "equal")


def examine_bug(bug: Bug) -> Finding:
    """What the check says of a step with the bug."""
    with planted(bug) as build:
        return examine(bug.name, bug.twin, build, bug.strategy, bug.devices, bug.mesh)


def run(command: BugsCommand) -> int:
    """Try them all, print the table, and return the exit code: 0 if all and nothing else was caught and explained."""
    found = startup.start(4)
    console = Console(highlight=False, soft_wrap=True, width=None if Console().is_terminal else 160)
    file = open_output(command.json, "--json") if command.json else None
    console.print(found.describe())
    bugs = [bug for bug in BUGS if bug.devices <= found.devices]
    findings, well = [], []
    for name, build in TWINS.items():
        devices = min(4, found.devices)
        findings.append(examine("none: the step as it is", name, build, "data_parallel", devices))
        well.append(not findings[-1].tier)
    for bug in bugs:
        findings.append(examine_bug(bug))
        well.append(findings[-1].explains(bug))
    print_findings(console, findings, well)
    if len(bugs) < len(BUGS):
        console.print(f"\n{len(BUGS) - len(bugs)} bugs need more than {found.devices} devices")
    if file:
        with file:
            data = [
                {**dataclasses.asdict(finding), "as_expected": good}
                for finding, good in zip(findings, well, strict=True)
            ]
            json.dump({"runtime": dataclasses.asdict(found), "findings": data}, file, indent=2)
    return 0 if all(well) else 1


def print_findings(console: Console, findings: list[Finding], well: list[bool]) -> None:
    """One row for each step."""
    table = Table(box=None, pad_edge=False)
    for heading in ("planted bug", "twin", "devices", "caught by", "error", "message"):
        table.add_column(heading, overflow="fold")
    for finding, good in zip(findings, well, strict=True):
        lines = [line.removeprefix("hint: ") for line in finding.message.splitlines()[1:]]
        likely = [line for line in lines if "exactly what comes of" in line] + [line for line in lines if ":" in line]
        cause = next(iter(likely), "nothing")
        caught = finding.tier or "[green]nothing" if good else f"[red]{finding.tier or 'nothing'}: WRONG"
        table.add_row(finding.name, finding.twin, str(finding.devices), caught, finding.figure, cause)
    console.print(table)
