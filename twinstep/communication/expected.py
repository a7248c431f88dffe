"""`assert_collectives`: what a step sends, as a part of its tests."""

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from twinstep.communication.account import Total, by_key, total_bytes, total_runs
from twinstep.communication.compiled import read_step
from twinstep.communication.entries import Collective
from twinstep.communication.groups import AnyMesh

UPDATE = "TWINSTEP_UPDATE"
"""Environment variable: 1 has snapshots written in place of compared. pytest's `--twinstep-update` sets it."""
Sent = dict[tuple[str, str], list[Collective]]
"""Axes (joined by commas, or `other groups`) and kind to collectives."""


def assert_collectives(
    step: Any,
    *args: Any,
    expected: Mapping[Any, Any] | str | Path,
    mesh: AnyMesh | None = None,
    update: bool | None = None,
    **kwargs: Any,
) -> list[Collective]:
    """Raise AssertionError unless a step sends exactly what is expected; return its collectives.

    step, arguments, mesh: as `collectives` takes them. expected: the file of a snapshot; or "none"; or a dict of mesh
    axes (a name, several joined by commas or as a tuple, or "other groups") to kinds to what each device sends of that
    kind:

        {"data": {"all_reduce": 4196}, "fsdp, tensor": {"all_gather": {"bytes": 1024, "count": 2}}, "context": "none"}

    A number is the input bytes of all runs, `count` the number of runs; "none" and "any" may stand for a kind, or for
    all of some axes. What is not named may not be sent. A snapshot is written if update is true (by default, if the
    environment has TWINSTEP_UPDATE=1, which pytest's `--twinstep-update` sets), to be reviewed and committed. Raises
    ValueError for an expectation that cannot be understood.
    """
    __tracebackhide__ = True
    found, mesh = read_step(step, *args, mesh=mesh, **kwargs)
    sent: Sent = {(", ".join(axes) or "other groups", kind): entries for (kind, axes), entries in by_key(found).items()}
    before: Mapping[str, Any] = {}
    if isinstance(expected, Path | str) and expected != "none":
        path = Path(expected)
        if os.environ.get(UPDATE) == "1" if update is None else update:
            write(path, snapshot(sent, mesh))
            return found
        before = read(path)
        problems = [*differing_mesh(before, mesh)] or [*compared(before["collectives"], sent, before["collectives"])]
        remedy = [f"if it should, review what --twinstep-update (or {UPDATE}=1) makes of {path}"]
    else:
        problems, remedy = [*compared({} if expected == "none" else normal(expected), sent, {})], []
    if problems:
        raise AssertionError("\n".join(["the step does not send what is expected", *problems, *remedy]))
    return found


def normal(expected: Any) -> dict[str, Any]:
    """The expectation with axes as text. Raises ValueError if it is of another form."""
    if not isinstance(expected, Mapping):
        raise ValueError(f'expected is {expected!r}; give "none", a dict of axes to kinds, or the path of a snapshot')
    found = {}
    for axes, kinds in expected.items():
        words = axes if isinstance(axes, tuple) else [word.strip() for word in str(axes).split(",")]
        if kinds not in ("none", "any") and not isinstance(kinds, Mapping):
            raise ValueError(f'expected over {", ".join(words)}: {kinds!r}; give "none", "any", or a dict of kinds')
        found[", ".join(words)] = kinds
    return found


def compared(expected: Mapping[str, Any], sent: Sent, before: Mapping[str, Any]) -> Iterator[str]:
    """Lines for all that differs. before: a snapshot's part with lines of source, to tell which are new."""
    named = {(axes, kind) for axes, kinds in expected.items() if isinstance(kinds, Mapping) for kind in kinds}
    for axes, kind in dict.fromkeys([*sent, *sorted(named)]):
        entries = sent.get((axes, kind), [])
        kinds = expected.get(axes, "none")
        wanted = kinds.get(kind, "none") if isinstance(kinds, Mapping) else kinds
        if wanted == "any":
            continue
        measures = {"bytes": total_bytes(entries), "count": total_runs(entries)}
        article = "an" if kind[0] in "aeiou" else "a"
        if wanted in ("none", 0):
            if entries:
                yield f"{article} {kind} over {axes} appeared: {described(measures)}"
                yield from sources(entries, ())
            continue
        wanted = wanted if isinstance(wanted, Mapping) else {"bytes": wanted}
        unknown = set(wanted) - {"bytes", "count", "sources"}
        if unknown or not set(wanted) & {"bytes", "count"}:
            raise ValueError(
                f'expected of {kind} over {axes}: {wanted!r}; give bytes, or {{"bytes": ..., "count": ...}}'
            )
        if any(as_data(measures[name]) != wanted[name] for name in measures if name in wanted):
            told = " in ".join(shown(name, wanted[name]) for name in measures if name in wanted)
            yield f"{kind} over {axes}: {described(measures) if entries else 'none'}, but {told} expected"
            yield from sources(entries, before.get(axes, {}).get(kind, {}).get("sources", ()))


def described(measures: Mapping[str, Total]) -> str:
    return " in ".join(shown(name, as_data(total)) for name, total in measures.items())


def shown(name: str, value: Any) -> str:
    """A total of bytes or runs, in words."""
    total = Total(*value) if isinstance(value, list | tuple) else value
    unit = {"bytes": "bytes", "count": "run" if value == 1 else "runs"}[name]
    return f"{total:,} {unit}" if isinstance(total, int | float) else f"{total} {unit}"


def as_data(total: Total) -> float | list[float | None]:
    """A number, or the least and the most of it; null for a most that is not known."""
    return total.least if total.exact else [total.least, total.most]


def sources(entries: Iterable[Collective], before: Iterable[str]) -> Iterator[str]:
    """One line for each line of source that sends something; if there is a snapshot, only those that it has not."""
    lines = Counter(lines_of(entries))
    files = Counter(without_line(line) for line in before)
    new = [line for line in lines.elements() if not files.get(without_line(line))]
    for line in dict.fromkeys(new or lines):
        yield f"  {'new: ' if new and files else ''}{line}"


def lines_of(entries: Iterable[Collective]) -> Iterator[str]:
    for c in entries:
        times = "an unknown number of times" if c.count is None else f"{c.count} x"
        where = "".join(f", branch {b.index} of {b.branches}" for b in c.branch)
        yield f"{times} {c.bytes:,} bytes of {c.arrays} array{'s' * (c.arrays != 1)}, source {c.source}{where}"


def without_line(text: str) -> str:
    """The text without the numbers of lines, which move with every edit."""
    head, _, source = text.partition("source ")
    return head + " ".join(word.partition(":")[0] for word in source.split())


def snapshot(sent: Sent, mesh: AnyMesh | None) -> dict[str, Any]:
    """What a snapshot file has."""
    found: dict[str, Any] = {}
    for (axes, kind), entries in sorted(sent.items()):
        found.setdefault(axes, {})[kind] = {
            "bytes": as_data(total_bytes(entries)),
            "count": as_data(total_runs(entries)),
            "sources": list(lines_of(entries)),
        }
    return {**place(mesh), "collectives": found}


def place(mesh: AnyMesh | None) -> dict[str, Any]:
    """Mesh and platform of a step."""
    platform = mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else None
    return {"mesh": dict(mesh.shape) if mesh else None, "platform": platform}


def differing_mesh(before: Mapping[str, Any], mesh: AnyMesh | None) -> Iterator[str]:
    """A line if the snapshot is of another mesh or platform."""
    for name, value in place(mesh).items():
        if value is not None and before.get(name) not in (None, value):
            yield f"the snapshot is of {name} {before[name]}, but this step of {name} {value}"


def write(path: Path, data: Any) -> None:
    """Write at once or not at all: other processes may write or read the same snapshot."""
    text = json.dumps(data, indent=2) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
        file.write(text)
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)


def read(path: Path) -> dict[str, Any]:
    """A snapshot. Raises AssertionError if there is none, ValueError if it is not one."""
    __tracebackhide__ = True
    if not path.exists():
        raise AssertionError(
            f"there is no snapshot {path}; write it with --twinstep-update (or {UPDATE}=1), and review it"
        )
    try:
        data = json.loads(path.read_text())
        return {**data, "collectives": dict(data["collectives"])}
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{path} is no snapshot of collectives ({error}); write it again with --twinstep-update"
        ) from None
