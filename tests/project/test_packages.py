"""Arrows between packages run one way, bench to twins to shared to twinstep, and in no circle; no folder is crowded."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RANK = {"twinstep": 0, "shared": 1, "auto_sharding": 2, "explicit_shardmap": 2, "bench": 3}
CROWDED = 14
"""Entries beyond which a listing no longer explains itself; the aim is about twelve."""
FILES = [path for package in RANK for path in (ROOT / package).rglob("*.py")]


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module(path) for path in FILES}


def imported(path: Path) -> set[str]:
    """The project's modules that a file imports anywhere, also for types or inside of a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            inside = {f"{node.module}.{name.name}" for name in node.names}
            found |= {name if name in MODULES else node.module for name in inside}
    return {name for name in found if name in MODULES}


def room(name: str) -> str:
    """The package of a module inside of the top-level one: `shared.model` of `shared.model.loss`."""
    return ".".join(name.split(".")[:2])


ARROWS = {(module(path), name) for path in FILES for name in imported(path)}


@pytest.mark.parametrize("package", RANK)
def test_arrows_run_one_way(package: str):
    wrong = [
        (source, target)
        for source, target in ARROWS
        if (ours := source.split(".")[0]) == package
        and (theirs := target.split(".")[0]) != ours
        and RANK[theirs] >= RANK[ours]
    ]
    assert not wrong


@pytest.mark.parametrize("of", [room, lambda name: name], ids=["packages", "modules"])
def test_there_is_no_circle(of):
    arrows = {(of(source), of(target)) for source, target in ARROWS}
    # A package's own __init__ may import its modules, which do not import it.
    remaining = {(source, target) for source, target in arrows if source != target}
    while True:
        targets = {source for source, _ in remaining}
        rest = {(source, target) for source, target in remaining if target in targets}
        if rest == remaining:
            break
        remaining = rest
    assert not remaining, f"each of these imports another of them: {sorted(remaining)}"


@pytest.mark.parametrize("top", [*RANK, "tests", "docs"])
def test_no_folder_is_crowded(top: str):
    for folder in [ROOT / top, *(path for path in (ROOT / top).rglob("*") if path.is_dir())]:
        if "__pycache__" not in folder.parts:
            entries = [path for path in folder.iterdir() if path.name != "__pycache__"]
            assert len(entries) <= CROWDED, f"{folder.relative_to(ROOT)} has {len(entries)} entries"
