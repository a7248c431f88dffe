"""The two packages are twins: the same files, the same public names, the same functions in the same order."""

import ast
import inspect
from pathlib import Path

import pytest

import auto_sharding
import explicit_shardmap
from shared.placement.strategies import STRATEGIES

ROOT = Path(__file__).parents[2]
LEGACY = {"pmap.py"}  # a chapter of the explicit twin alone


def functions(path: Path) -> list[str]:
    """Functions (with parameters) and classes of a module, in order. Small letters in a name are local sizes."""
    found = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.append(f"{node.name}({', '.join(argument.arg.casefold() for argument in node.args.args)})")
        if isinstance(node, ast.ClassDef):
            found.append(node.name)
    return found


FILES = sorted(path.name for path in (ROOT / "auto_sharding").glob("*.py"))


def test_the_same_files():
    assert sorted({path.name for path in (ROOT / "explicit_shardmap").glob("*.py")} - LEGACY) == FILES


@pytest.mark.parametrize("name", FILES)
def test_the_same_functions_in_the_same_order(name: str):
    ours, theirs = (functions(ROOT / package / name) for package in ("auto_sharding", "explicit_shardmap"))
    assert ours == theirs


def test_the_same_public_names():
    assert auto_sharding.__all__ == explicit_shardmap.__all__
    for name in auto_sharding.__all__:
        ours, theirs = getattr(auto_sharding, name), getattr(explicit_shardmap, name)
        assert inspect.signature(ours) == inspect.signature(theirs)


def test_every_strategy_that_is_a_file_of_its_own_is_in_the_table():
    strategies = {name.removesuffix(".py") for name in FILES} - {"__init__", "__main__", "step", "accumulation"}
    assert strategies <= set(STRATEGIES)


def test_only_the_explicit_twin_names_collectives():
    """Where the communication is, is the lesson: the auto twin may not call a collective, nor the shared code."""
    collectives = {"psum", "pmean", "pmax", "all_gather", "psum_scatter", "ppermute", "all_to_all", "pcast"}
    for folder in ("auto_sharding", "shared"):
        for path in (ROOT / folder).glob("*.py"):
            nodes = list(ast.walk(ast.parse(path.read_text())))
            called = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
            imported = {name.name for node in nodes if isinstance(node, ast.ImportFrom) for name in node.names}
            assert not (called | imported) & collectives, path
