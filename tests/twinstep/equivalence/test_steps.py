"""Steps as other projects write them: equal to itself, on one device and on eight, and to none with a mistake."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.twinstep.equivalence.steps import KINDS, MISTAKES, Kind, Mistake
from twinstep import assert_equivalent, compare
from twinstep.equivalence.arguments import is_array

QUICK = ("a dictionary with a key", "NNX in place")


def on_eight(step: Callable[..., Any]) -> Callable[..., Any]:
    """The same step in data parallelism: the batch split over eight devices, everything else on all of them."""
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))

    def placed(tree: Any, spec: P) -> Any:
        def place(leaf: Any) -> Any:
            if isinstance(leaf, nnx.Pytree):
                nnx.update(leaf, jax.tree.map(place, nnx.state(leaf)))
                return leaf
            return jax.device_put(leaf, NamedSharding(mesh, spec)) if is_array(leaf) else leaf

        return jax.tree.map(place, tree, is_leaf=lambda node: isinstance(node, nnx.Pytree))

    def run(*args: Any) -> Any:
        *rest, batch = args
        return step(*placed(rest, P()), placed(batch, P("data")))

    return run


@pytest.fixture(scope="module")
def references() -> dict[str, Callable[..., Any]]:
    """The right steps, compiled once for all tests."""
    return {name: kind.build(Mistake()) for name, kind in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_step_is_equal_to_itself_on_one_device_and_on_eight(kind: Kind, references: dict[str, Callable[..., Any]]):
    args = kind.arguments()
    for candidate in (kind.build(Mistake()), on_eight(references[kind.name])):
        report = assert_equivalent(references[kind.name], candidate, *args, **kind.options)
        assert (report.float64 is not None) == kind.float64, report


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, kind in KINDS.items()],
)
def test_a_mistake_is_caught(kind: Kind, mistake: Mistake, references: dict[str, Callable[..., Any]]):
    report = compare(references[kind.name], kind.build(mistake), *kind.arguments(), **kind.options)
    assert not report.equal, report
    assert "significant bits" in str(report.problems) or any(
        np.isfinite(leaf.error) and not leaf.equal for leaf in (*report.leaves, *(report.float64 or report).leaves)
    )
