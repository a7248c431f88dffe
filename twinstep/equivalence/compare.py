"""Are two functions the same? Compares what they return of the same arguments, leaf by leaf, and says what differs.

    assert_equivalent(my_jitted_step, my_shard_map_step, state, batch)

Each function may return any pytree. How an error is measured is said in leaves.py, how large it may be in tolerance.py
and, measured on the reference itself, in perturbation.py; exact.py compares both once more in float64. All copies of
an array that is declared replicated are compared bit by bit (replicas.py). Where something differs, the report says
what known mistakes leave such a difference behind (hints.py, parts.py).
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp

from twinstep.equivalence.arguments import Arguments, Function, call, module_names, take_apart, unchanged
from twinstep.equivalence.exact import exact_report
from twinstep.equivalence.factors import EVERYTHING, common_factors
from twinstep.equivalence.hints import Suspect, explained, hints
from twinstep.equivalence.leaves import Leaf, Named, Pairs, Rule, measured, named_results, paired
from twinstep.equivalence.parts import mesh_axes, split_suspects
from twinstep.equivalence.perturbation import movement
from twinstep.equivalence.precision import shorter_problems
from twinstep.equivalence.replicas import differing_replicas
from twinstep.equivalence.report import Report
from twinstep.equivalence.tolerance import MOVES, Work, work_behind

NOTHING = (
    "returned nothing to compare, and changed no nnx module in place; return what it computes: loss, gradients, state"
)


def compare(
    reference: Function,
    candidate: Function,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    dtype: Any = None,
    relative: float | None = None,
    float64: bool = True,
) -> Report:
    """Call both on copies of the same arguments, so that either may donate, and compare what they return.

    args: what both are called with: pytrees, NNX modules, anything. NNX modules that are changed in place are compared
        as they are afterwards. The last one counts as the batch: its largest array tells how many terms a sum has, and
        where something differs, the reference is also called on the parts of it that devices would have.
    kwargs: keyword arguments for both.
    dtype: the type of the computation, if it is not that of each leaf (bfloat16 activations with float32 gradients).
    relative: a tolerance of your own in place of the rule's, as a share of each leaf's scale. 0 asks for equal bits.
    float64: compare in float64 too, if both can be computed in it. False saves the time, and allows for constants that
        are rounded to float32 in one of the two only.

    The reference is called four times in its own type and four in float64, the candidate once in each. Raises
    ValueError where nothing is returned that could be compared.
    """
    arguments = take_apart(args, kwargs or {})
    names = module_names(reference, arguments)
    expected, found = call(reference, arguments, names), call(candidate, arguments, names)
    require_results(arguments, names, expected, found)
    work = work_behind(*split_batch(arguments, args))
    types = arguments.dtypes()
    python = max(types, key=lambda kind: jnp.finfo(kind).eps) if types else jnp.dtype(jnp.float32)
    moved, notes = {}, []
    if relative != 0:
        try:
            moved = movement(lambda nudged: call(reference, nudged, names), arguments, expected, dtype)
        except Exception as error:  # compiled for one placement, or data that other processes hold
            notes.append(f"scales of rounding could not be measured: {first_line(error)}")
    options: dict[str, Any] = {"dtype": dtype, "relative": relative, "moved": moved, "python": python}
    report = compare_results(expected, found, work, **options)
    if report.equal:
        exact = None
        if float64 and relative is None and any(kind != jnp.float64 for kind in types):
            exact, why = exact_report(reference, candidate, arguments, names, work, compare_results)
            notes.append(why)
        elif any(kind != jnp.float64 for kind in types):
            notes.append("float64: not compared, as asked")
        return dataclasses.replace(report, float64=exact, notes=tuple(notes))
    suspects: list[Suspect] = []
    try:
        if args:

            def of_part(part: Any) -> Named:
                return call(reference, take_apart((*args[:-1], part), kwargs or {}), names)

            suspects += split_suspects(of_part, args[-1], mesh_axes(found))
    except Exception as error:  # a reference that takes no other batch size has no say in this
        notes.append(
            f"mistakes with parts of the batch were not tried: the reference refuses them: {first_line(error)}"
        )
    return dataclasses.replace(compare_results(expected, found, work, **options, suspects=suspects), notes=tuple(notes))


def assert_equivalent(reference: Function, candidate: Function, *args: Any, **options: Any) -> Report:
    """As `compare`, with its options; raises AssertionError with a readable table unless the two are equal."""
    report = compare(reference, candidate, *args, **options)
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
    moved: Mapping[str, float] | None = None,
    factor: float | None = None,
    suspects: Iterable[Suspect] = (),
    python: Any = jnp.float32,
    moves: float = MOVES,
) -> Report:
    """Compare two pytrees that the two functions have returned; dtype and relative are those of `compare`.

    moved: how far each leaf of expected moves with one unit in the last place of the inputs (perturbation.py); a leaf
    that is not in it is measured against its own norm. factor: how far from 1 a group's common factor may be, where
    that is to be less than the rule's. suspects: mistakes to look for if something differs. python: the type whose
    rounding a Python float has. moves: how many times `moved` is allowed.
    """
    rule = Rule(work, dtype, relative, moved or {}, moves)
    expected, found = named_results(expected), named_results(found)
    pairs, problems = paired(expected, found, python)
    problems += [f"{line} (in the reference)" for line in differing_replicas(expected)]
    drifting = differing_replicas(found)
    problems += drifting
    leaves = measured(pairs, rule)
    problems += factor_problems(leaves, pairs, rule, factor)
    problems += shorter_problems(leaves, pairs, rule)
    if not leaves and not problems:
        problems.append("nothing was compared: there is no number in either result; return what the step computes")
    wrong = [leaf for leaf in leaves if not leaf.equal]
    found_hints = (
        (
            *explained(list(suspects), wrong, found, rule, {line.split(": ")[0] for line in drifting}),
            *hints(leaves, pairs, mesh_axes(found)),
        )
        if wrong or problems
        else ()
    )
    return Report(leaves, tuple(problems), found_hints)


def factor_problems(leaves: tuple[Leaf, ...], pairs: Pairs, rule: Rule, factor: float | None) -> list[str]:
    """A line for each group whose leaves have a factor in common that no single one of them shows.

    And for all leaves together, if no group has one. factor: a limit for groups in place of the rule's.
    """
    if rule.relative == 0:
        return []
    right = [leaf for leaf in leaves if leaf.equal]
    lines = []
    for group, (value, allowed, number) in common_factors(leaves if factor else right, pairs, rule).items():
        limit = factor if factor and group != EVERYTHING else allowed
        if abs(value - 1) > limit and not (group == EVERYTHING and lines):
            lines.append(
                f"{group}: {value:.6g} times the reference, {number} leaves taken together; rounding explains no "
                f"factor further from 1 than {limit:.2g}"
            )
    return lines


def require_results(arguments: Arguments, names: list[str], expected: Named, found: Named) -> None:
    """Raises ValueError if one of the two has nothing to show."""
    before = call(lambda *args, **kwargs: None, arguments, names)
    for name, result in (("reference", expected), ("candidate", found)):
        returned = [leaf for leaf in result if not leaf.startswith("after.")]
        if all(result[leaf] is None for leaf in returned) and unchanged(before, result):
            raise ValueError(f"the {name} {NOTHING}")


def split_batch(arguments: Arguments, args: tuple[Any, ...]) -> tuple[list[Any], Any]:
    """The leaves of the last positional argument as the batch, and all others as the state."""
    batch = take_apart(args[-1:], {}).leaves
    own = {id(leaf) for leaf in batch}
    return [leaf for leaf in arguments.leaves if id(leaf) not in own], list(batch)


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
