"""The two forms can be read side by side: the same files, the same functions, and a short diff of the steps."""

import ast
import difflib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TWINS = ("auto_sharding", "explicit_shardmap")
ONLY_EXPLICIT = {"pmap.py"}
"""The legacy chapter."""
OWN = {
    "fsdp.py": {"gather"},
    "context_parallel.py": {"attend_to_gathered_keys", "ring_attention"},
    "tensor_parallel.py": {"vocabulary_parallel_loss"},
}
"""Functions that one twin alone needs."""


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


def test_the_diff_of_the_steps_is_at_most_30_lines():
    """As `diff auto_sharding/step.py explicit_shardmap/step.py` has lines that begin with < or >."""
    auto, explicit = ((ROOT / twin / "step.py").read_text().splitlines() for twin in TWINS)
    changed = [line for line in difflib.ndiff(auto, explicit) if line.startswith(("- ", "+ "))]
    assert 10 < len(changed) <= 30, "\n".join(changed)
