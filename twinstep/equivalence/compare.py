"""Are two steps the same? Compares any two functions of (state, batch), leaf by leaf, and says what differs.

    assert_equivalent(my_jitted_step, my_shard_map_step, state, batch)

Each function may return any pytree; entries at its top level (`loss`, `gradients`, ...) are called groups. How an
error is measured is said in leaves.py, how large it may be in tolerance.py. All copies of an array that
is declared replicated are compared bit by bit (replicas.py). Where something differs, the report says what known
mistakes leave such a difference behind (hints.py).
"""

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from twinstep.equivalence.hints import Suspect, explained, hints, mesh_axes, split_suspects
from twinstep.equivalence.leaves import Leaf, Rule, common_factors, measured, paired
from twinstep.equivalence.replicas import differing_replicas
from twinstep.equivalence.tolerance import Work, work_behind
from twinstep.tree import named_leaves

Step = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Report:
    """What a comparison found. `problems` are differences that have no size: missing leaves, shapes, replicas."""

    leaves: tuple[Leaf, ...]
    problems: tuple[str, ...]
    hints: tuple[str, ...] = ()
    """What is likely to be the cause, if something differs."""

    @property
    def equal(self) -> bool:
        return not self.problems and all(leaf.equal for leaf in self.leaves)

    @property
    def identical(self) -> int:
        """Number of leaves without any difference at all."""
        return sum(leaf.error == 0 for leaf in self.leaves)

    def worst(self, group: str | None = None) -> Leaf:
        """The leaf, of this group if one is named, that used most of its tolerance."""
        return max((leaf for leaf in self.leaves if group in (None, leaf.group)), key=lambda leaf: leaf.used)

    def __str__(self) -> str:
        """A table of the differing leaves (of the closest calls, where none differs), problems and hints first."""
        failed = [leaf for leaf in self.leaves if not leaf.equal]
        shown = sorted(failed or self.leaves, key=lambda leaf: -leaf.used)[: 20 if failed else 5]
        verdict = "equal" if self.equal else "NOT EQUAL"
        table = Table("leaf", "relative error", "tolerance", "error / tolerance", "ratio", box=None)
        for leaf in shown:
            table.add_row(
                leaf.name, f"{leaf.error:.2e}", f"{leaf.tolerance:.1e}", f"{leaf.used:.2g}", f"{leaf.ratio:.6g}"
            )
        printed = io.StringIO()
        Console(file=printed, width=120).print(table)
        lines = [f"{verdict}: {len(failed)} of {len(self.leaves)} leaves differ", *self.problems[:4]]
        if len(self.problems) > 4:
            lines.append(f"... and {len(self.problems) - 4} more such lines")
        lines += [f"hint: {hint}" for hint in self.hints]
        lines += [line.rstrip() for line in printed.getvalue().splitlines()]
        if len(failed) > len(shown):
            lines.append(f"... and {len(failed) - len(shown)} more")
        return "\n".join(lines)


def compare(
    reference: Step, candidate: Step, state: Any, batch: Any, *, dtype: Any = None, relative: float | None = None
) -> Report:
    """Call both on copies of (state, batch), so that either may donate, and compare what they return.

    dtype: the type of the computation, if it is not that of each leaf (bfloat16 activations with float32
    gradients). relative: a tolerance of your own in place of the rule's. If something differs, the reference is also
    called on the pieces that devices would have of the batch, to see whether the candidate forgot to join them.
    """

    def call(step: Step, batch: Any) -> Any:
        return jax.block_until_ready(step(*fresh((state, batch))))

    expected, found = call(reference, batch), call(candidate, batch)
    work = work_behind(state, batch)
    report = compare_results(expected, found, work, dtype=dtype, relative=relative)
    if report.equal:
        return report
    try:
        suspects = list(
            split_suspects(lambda _, batch: call(reference, batch), state, batch, mesh_axes(named_leaves(found)))
        )
    except Exception:  # a reference that takes no other batch size has no say in this
        return report
    return compare_results(expected, found, work, dtype=dtype, relative=relative, suspects=suspects)


def assert_equivalent(reference: Step, candidate: Step, state: Any, batch: Any, **options: Any) -> Report:
    """As `compare`, with its options; raises AssertionError with a readable table unless the two are equal."""
    report = compare(reference, candidate, state, batch, **options)
    if not report.equal:
        raise AssertionError(str(report))
    return report


def compare_results(
    expected: Any,
    found: Any,
    work: Work,
    *,
    dtype: Any = None,
    relative: float | None = None,
    factor: float | None = None,
    suspects: Iterable[Suspect] = (),
) -> Report:
    """Compare two pytrees that the two functions have returned; dtype and relative are those of `compare`.

    factor: how far a factor common to all numbers of a group may be from 1, where that is to be less than the
    tolerance of a leaf. suspects: mistakes to look for if something differs.
    """
    rule = Rule(work, dtype, relative)
    pairs, problems = paired(expected, found)
    named = named_leaves(found)
    problems += [f"{line} (in the reference)" for line in differing_replicas(named_leaves(expected))]
    drifting = differing_replicas(named)
    problems += drifting
    if factor is not None:
        problems += [
            f"{group}: {value:.6g} times the reference as a whole, which is further from 1 than {factor}"
            for group, value in common_factors(pairs).items()
            if abs(value - 1) > factor
        ]
    leaves = measured(pairs, rule)
    wrong = [leaf for leaf in leaves if not leaf.equal]
    found_hints = (
        (
            *explained(list(suspects), wrong, found, rule, {line.split(": ")[0] for line in drifting}),
            *hints(leaves, pairs, mesh_axes(named)),
        )
        if wrong or problems
        else ()
    )
    return Report(leaves, tuple(problems), found_hints)


def fresh(tree: Any) -> Any:
    """The tree with every JAX array copied in place."""
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, tree)
