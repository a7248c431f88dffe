"""Are two steps the same? Compares any two functions of (state, batch), leaf by leaf, and says what differs.

    assert_equivalent(my_jitted_step, my_shard_map_step, state, batch)

Each function may return any pytree; entries at its top level (`loss`, `gradients`, ...) are called groups. A leaf's
error is the norm of the difference over the norm of the reference leaf, or over a floor in proportion to its group's
norm (`FLOOR`) where that is larger: a leaf whose true value is zero (a key bias: softmax does not see a shift) holds
nothing but rounding, and relative to itself any rounding is large.

How large an error may be follows from a rule (shared/tolerance.py).
"""

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from shared.tolerance import Work, tolerance, work_behind
from shared.tree import named_leaves

FLOOR, BFLOAT16_FLOOR = 1e-3, 1e-2
"""Share of the group's norm below which a leaf is not measured against itself. In a leaf whose true value is zero the
rounding is in proportion to what was summed, of which the group's norm tells the size; in bfloat16 it is coarser."""

Step = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Leaf:
    """One leaf compared."""

    name: str
    error: float
    """Norm of the difference, relative (see the module); infinite where either side is not finite."""
    tolerance: float
    ratio: float
    """The factor by which the candidate's leaf is longer along the reference's; NaN where the reference is zero."""

    @property
    def group(self) -> str:
        return self.name.split(".")[0]

    @property
    def equal(self) -> bool:
        return self.error <= self.tolerance

    @property
    def used(self) -> float:
        """Share of the tolerance used."""
        return self.error / max(self.tolerance, np.finfo(float).tiny)


@dataclass(frozen=True)
class Report:
    """What a comparison found. `problems` are differences that have no size: missing leaves, shapes, replicas."""

    leaves: tuple[Leaf, ...]
    problems: tuple[str, ...]
    devices: int
    """Number of devices that hold the candidate's result."""

    @property
    def equal(self) -> bool:
        return not self.problems and all(leaf.equal for leaf in self.leaves)

    def worst(self, group: str | None = None) -> Leaf:
        """The leaf, of this group if one is named, that used most of its tolerance."""
        return max((leaf for leaf in self.leaves if group in (None, leaf.group)), key=lambda leaf: leaf.used)

    def hints(self) -> list[str]:
        """What a factor common to the differing leaves of a group usually means."""
        found = []
        for group in dict.fromkeys(leaf.group for leaf in self.leaves if not leaf.equal):
            # A factor explains a leaf if the leaf's error is no larger than the factor's distance from 1.
            scaled = [leaf for leaf in self.leaves if leaf.group == group and not leaf.equal]
            ratios = [leaf.ratio for leaf in scaled if leaf.error <= 1.1 * abs(leaf.ratio - 1)]
            factor = float(np.median(ratios)) if ratios else math.nan
            alike = sum(math.isclose(ratio, factor, rel_tol=0.01) for ratio in ratios)
            if alike < 0.75 * len(scaled):
                continue
            found.append(f"hint: {group}: {factor:.4g} times the reference{self.meaning(factor)}")
        return found

    def meaning(self, factor: float) -> str:
        """What this factor has to do with the number of devices, or nothing."""
        n = self.devices
        if n < 2:
            return ""
        meanings = {
            n: f"summed over {n} devices where the mean is meant, or reduced twice? (Under shard_map the gradient of "
            'replicated parameters is summed already; lax.pcast(params, axis, to="varying") keeps it local.)',
            n * n: f"summed twice over {n} devices?",
            1 / n: f"averaged twice, or not yet summed, over {n} devices?",
        }
        return next((f": {text}" for size, text in meanings.items() if math.isclose(factor, size, rel_tol=0.01)), "")

    def __str__(self) -> str:
        """A table of the differing leaves (of the closest calls, where none differs), problems and hints first."""
        failed = [leaf for leaf in self.leaves if not leaf.equal]
        shown = sorted(failed or self.leaves, key=lambda leaf: -leaf.used)[: 20 if failed else 5]
        verdict = "equal" if self.equal else "NOT EQUAL"
        table = Table(
            "leaf", "relative error", "tolerance", "error / tolerance", "ratio", title_justify="left", box=None
        )
        for leaf in shown:
            table.add_row(
                leaf.name, f"{leaf.error:.2e}", f"{leaf.tolerance:.1e}", f"{leaf.used:.2g}", f"{leaf.ratio:.6g}"
            )
        printed = io.StringIO()
        Console(file=printed, width=120).print(table)
        lines = [f"{verdict}: {len(failed)} of {len(self.leaves)} leaves differ", *self.problems, *self.hints()]
        lines += [line.rstrip() for line in printed.getvalue().splitlines()]
        if len(failed) > len(shown):
            lines.append(f"... and {len(failed) - len(shown)} more")
        return "\n".join(lines)


def compare(
    reference: Step, candidate: Step, state: Any, batch: Any, *, dtype: Any = None, relative: float | None = None
) -> Report:
    """Call both on copies of (state, batch), so that either may donate, and compare what they return.

    dtype: the type of the computation, if it is not that of each leaf (bfloat16 activations with float32
    gradients). relative: a tolerance of your own in place of the rule's.
    """
    expected, found = (jax.block_until_ready(step(*fresh((state, batch)))) for step in (reference, candidate))
    return compare_results(expected, found, work_behind(state, batch), dtype=dtype, relative=relative)


def assert_equivalent(reference: Step, candidate: Step, state: Any, batch: Any, **options: Any) -> Report:
    """As `compare`, with its options; raises AssertionError with a readable table unless the two are equal."""
    report = compare(reference, candidate, state, batch, **options)
    if not report.equal:
        raise AssertionError(str(report))
    return report


def compare_results(
    expected: Any, found: Any, work: Work, *, dtype: Any = None, relative: float | None = None
) -> Report:
    """Compare two pytrees that the two functions have returned; the options are those of `compare`."""
    ours, theirs = named_leaves(expected), named_leaves(found)
    problems = [f"{name}: only in the reference" for name in ours if name not in theirs]
    problems += [f"{name}: only in the candidate" for name in theirs if name not in ours]
    pairs: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for name in ours:
        if name in theirs:
            left, right = plain(ours[name]), plain(theirs[name])
            if left.shape != right.shape or left.dtype != right.dtype:
                kinds = (f"{side.dtype}{list(side.shape)}" for side in (left, right))
                problems.append(f"{name}: {' in the reference, '.join(kinds)} in the candidate")
            else:
                pairs[name] = (left, right)
    problems += [f"{line} (in the reference)" for line in differing_replicas(ours)] + differing_replicas(theirs)

    squares: dict[str, float] = {}
    for name, (left, _) in pairs.items():
        group = name.split(".")[0]
        squares[group] = squares.get(group, 0.0) + norm(left) ** 2
    leaves = []
    for name, (left, right) in pairs.items():
        allowed = leaf_tolerance(left.dtype, dtype, work, relative)
        coarse = jnp.dtype(dtype or left.dtype) == jnp.bfloat16
        floor = (BFLOAT16_FLOOR if coarse else FLOOR) * math.sqrt(squares[name.split(".")[0]])
        leaves.append(Leaf(name, error(left, right, floor), allowed, ratio(left, right)))
    devices = {device for leaf in theirs.values() if isinstance(leaf, jax.Array) for device in leaf.sharding.device_set}
    return Report(tuple(leaves), tuple(problems), len(devices))


def leaf_tolerance(leaf: np.dtype, computation: Any, work: Work, relative: float | None) -> float:
    """The tolerance for a leaf of this type, by the caller or by the rule; whole numbers and keys must be the same."""
    if not jnp.issubdtype(leaf, jnp.floating):
        return 0.0
    return tolerance(computation or leaf, work) if relative is None else relative


def fresh(tree: Any) -> Any:
    """The tree with every JAX array copied in place."""
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


def plain(leaf: Any) -> np.ndarray:
    """The leaf's values on the host; of a random key its words, of complex numbers their two parts."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    values = np.asarray(leaf)
    return np.stack([values.real, values.imag]) if np.iscomplexobj(values) else values


def norm(values: np.ndarray) -> float:
    return float(np.linalg.norm(values.astype(np.float64).ravel()))


def error(left: np.ndarray, right: np.ndarray, floor: float) -> float:
    """Norm of the difference over the larger of the left norm and the floor."""
    left, right = left.astype(np.float64), right.astype(np.float64)
    if not (np.isfinite(left).all() and np.isfinite(right).all()):
        return math.inf
    distance, scale = norm(right - left), max(norm(left), floor)
    return distance / scale if scale else math.inf if distance else 0.0


def ratio(left: np.ndarray, right: np.ndarray) -> float:
    """<left, right> / <left, left>: the factor of the best fit of the right by the left."""
    left, right = left.astype(np.float64).ravel(), right.astype(np.float64).ravel()
    square = float(left @ left)
    return float(left @ right) / square if square > 0 else math.nan


def differing_replicas(leaves: dict[str, Any]) -> list[str]:
    """One line for each leaf whose copies on different devices are not the same bits.

    JAX takes it on trust that an array declared replicated is, and numpy shows the first device's copy only; so a
    step that forgets a reduction can look right. All copies that this process holds are compared.
    """
    found = []
    for name, leaf in leaves.items():
        if not isinstance(leaf, jax.Array):
            continue
        copies: dict[str, tuple[Any, np.ndarray]] = {}
        for shard in leaf.addressable_shards:
            data = plain(shard.data)
            device, first = copies.setdefault(str(shard.index), (shard.device, data))
            if first.tobytes() != data.tobytes():
                difference = np.max(np.abs(data.astype(np.float64) - first.astype(np.float64)))
                found.append(
                    f"{name}: the copies on {device} and {shard.device} differ by up to {difference:.2e}, "
                    "though the array is declared replicated: a reduction is missing"
                )
                break
    return found
