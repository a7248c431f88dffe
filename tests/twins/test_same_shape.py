"""The two forms can be read side by side: the same files, the same functions, and a short diff of the steps."""

import ast
import difflib
import inspect
from pathlib import Path

import pytest

import auto_sharding
import explicit_shardmap
from shared.placement.strategies import STRATEGIES

ROOT = Path(__file__).parents[2]
TWINS = ("auto_sharding", "explicit_shardmap")
ONLY_EXPLICIT = {"pmap.py"}
"""The legacy chapter."""
OWN = {
    "fsdp.py": {"gather"},
    "context_parallel.py": {"attend_to_gathered_keys", "ring_attention"},
    "tensor_parallel.py": {"vocabulary_parallel_loss"},
}
"""Functions that only one twin needs."""
NO_STRATEGIES = {"__init__.py", "__main__.py", "minimal.py", "step.py", "accumulation.py", "decode.py", "zero.py"}


def functions(twin: str, file: str) -> list[str]:
    tree = ast.parse((ROOT / twin / file).read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [name for name in names if name not in OWN.get(file, ())]


def files(twin: str) -> set[str]:
    return {path.name for path in (ROOT / twin).glob("*.py")} - ONLY_EXPLICIT


def test_the_same_files():
    assert files(TWINS[0]) == files(TWINS[1])


@pytest.mark.parametrize("file", sorted(files(TWINS[0])))
def test_the_same_functions_in_the_same_order(file: str):
    auto, explicit = (functions(twin, file) for twin in TWINS)
    assert auto == explicit


def test_the_same_public_names():
    assert auto_sharding.__all__ == explicit_shardmap.__all__
    assert inspect.signature(auto_sharding.build) == inspect.signature(explicit_shardmap.build)


def test_the_diff_of_the_steps_is_at_most_30_lines():
    """As `diff auto_sharding/step.py explicit_shardmap/step.py` has lines that begin with < or >."""
    auto, explicit = ((ROOT / twin / "step.py").read_text().splitlines() for twin in TWINS)
    changed = [line for line in difflib.ndiff(auto, explicit) if line.startswith(("- ", "+ "))]
    assert 10 < len(changed) <= 30, "\n".join(changed)


def test_every_strategy_that_is_a_file_of_its_own_is_in_the_table():
    assert {name.removesuffix(".py") for name in files(TWINS[0]) - NO_STRATEGIES} <= set(STRATEGIES)


def test_only_the_explicit_twin_names_collectives():
    """Where the communication is, is the lesson: the auto twin may not call a collective, nor the shared code."""
    collectives = {"psum", "pmean", "pmax", "all_gather", "psum_scatter", "ppermute", "all_to_all", "pcast"}
    for folder in ("auto_sharding", "shared"):
        for path in (ROOT / folder).rglob("*.py"):
            nodes = list(ast.walk(ast.parse(path.read_text())))
            called = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
            imported = {name.name for node in nodes if isinstance(node, ast.ImportFrom) for name in node.names}
            assert not (called | imported) & collectives, path
