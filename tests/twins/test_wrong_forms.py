"""Gradients inside `shard_map`: what each way of writing them gives, and that the wrong ones are rejected.

Parameters are replicated and the batch is split over 8 devices. The table has, for each form, the result divided by
the true gradient of the global mean loss: under `shard_map`'s default, with its checks off (`check_vma=False`), and
with the parameters first made varying by `lax.pcast`, the form that this project teaches.

- LOCAL: the devices return different values. With checks off that is accepted under `out_specs=P()` without a word.
- REFUSED: the same, but `shard_map` raises, since a varying value cannot be declared replicated.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shared.placement.mesh import make_mesh
from twinstep.equivalence.compare import compare

LOCAL, REFUSED = "local", "refused"

TABLE = {
    # (what is differentiated, what is done to the gradients): (default, checks off, parameters made varying)
    ("local mean", "nothing"): (8, LOCAL, REFUSED),
    ("local mean", "pmean"): (8, 1, 1),
    ("local mean", "psum"): (64, 8, 8),
    ("pmean of local mean", "nothing"): (1, LOCAL, REFUSED),
    ("pmean of local mean", "pmean"): (1, 1, 1 / 8),
    ("local sum / B", "nothing"): (1, LOCAL, REFUSED),
    ("local sum / B", "psum"): (8, 1, 1),
}
MODES = ("default", "checks off", "varying")
CASES = [(*form, mode, given) for form, row in TABLE.items() for mode, given in zip(MODES, row, strict=True)]


def losses(params: dict[str, jax.Array], x_BD: jax.Array) -> jax.Array:
    """One loss for each row of the batch."""
    return jnp.square(jnp.tanh(x_BD @ params["in"]) @ params["out"] - 1)


def reference(params: dict[str, jax.Array], x_BD: jax.Array) -> dict[str, Any]:
    return {"gradients": jax.grad(lambda params: losses(params, x_BD).mean())(params)}


def written(loss: str, after: str, mode: str, rows: int) -> Callable[..., Any]:
    """The gradients under `shard_map`, written in one of the table's forms."""

    def step(params: dict[str, jax.Array], x_bD: jax.Array) -> dict[str, Any]:
        if mode == "varying":
            params = lax.pcast(params, "data", to="varying")

        def differentiated(params: dict[str, jax.Array]) -> jax.Array:
            if loss == "local sum / B":
                return losses(params, x_bD).sum() / rows
            mean = losses(params, x_bD).mean()
            return lax.pmean(mean, "data") if loss == "pmean of local mean" else mean

        gradients = jax.grad(differentiated)(params)
        finish = {"nothing": lambda tree, axis: tree, "pmean": lax.pmean, "psum": lax.psum}[after]
        return {"gradients": finish(gradients, "data")}

    return jax.shard_map(
        step,
        mesh=make_mesh("data_parallel", 8),
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=mode != "checks off",
    )


@pytest.mark.parametrize(("loss", "after", "mode", "given"), CASES)
def test_form(loss: str, after: str, mode: str, given: Any):
    random = np.random.default_rng(0)
    params = {"in": random.normal(size=(4, 8)).astype(np.float32), "out": random.normal(size=8).astype(np.float32)}
    x_BD = random.normal(size=(16, 4)).astype(np.float32)
    candidate = jax.jit(written(loss, after, mode, len(x_BD)))
    if given == REFUSED:
        with pytest.raises(ValueError, match="out_specs"):
            candidate(params, x_BD)
        return
    report = compare(jax.jit(reference), candidate, params, x_BD)
    if given == LOCAL:
        assert any("the copies on" in problem for problem in report.problems)
    else:
        assert not report.problems
        for leaf in report.leaves:
            assert leaf.ratio == pytest.approx(given, rel=1e-5)
    assert report.equal == (given == 1), str(report)
    if given in (8, 64, 1 / 8):
        assert f"{given:.4g} times the reference" in str(report)
