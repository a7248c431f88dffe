"""The float64 tier: both functions again, on the same arguments cast up, where rounding hides next to nothing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from twinstep.equivalence.arguments import Arguments, Function, call, is_array
from twinstep.equivalence.leaves import Named, is_key
from twinstep.equivalence.perturbation import movement
from twinstep.equivalence.report import Report
from twinstep.equivalence.tolerance import EXACT, Work, roundoff

EXACT_MOVES = {
    "abs", "all_gather", "all_to_all", "bitcast_convert_type", "broadcast_in_dim", "concatenate", "copy", "copy_p",
    "dynamic_slice", "dynamic_update_slice", "gather", "iota", "max", "min", "neg", "optimization_barrier", "pad",
    "pbroadcast", "pcast", "ppermute", "pvary", "reduce_max", "reduce_min", "reshape", "rev", "select_n",
    "sharding_constraint", "sign", "slice", "sort", "split", "squeeze", "stop_gradient", "transpose",
}  # fmt: skip
"""Primitives that give of narrow floating numbers the same numbers again, without rounding."""


def cast_up(leaf: Any) -> Any:
    """The floating array in float64, in the same place. Call within `jax.enable_x64(True)`."""
    return leaf.astype(jnp.float64) if isinstance(leaf, jax.Array) else np.asarray(leaf, np.float64)[()]


def narrow_step(function: Function, arguments: Arguments, names: Sequence[str]) -> str:
    """Where the function rounds to a type narrower than float64 although its inputs are float64; empty if nowhere.

    Empty as well if the function cannot be traced: then its results alone decide.
    """
    arrays = [place for place, leaf in enumerate(arguments.leaves) if is_array(leaf)]

    def traced(values: Sequence[Any]) -> list[Any]:
        leaves = list(arguments.leaves)
        for place, value in zip(arrays, values, strict=True):
            leaves[place] = value
        results = call(function, Arguments(leaves, arguments.assemble, arguments.paths), names)
        return [leaf for leaf in results.values() if isinstance(leaf, (jax.Array, np.ndarray))]

    try:
        program = jax.make_jaxpr(traced)([arguments.leaves[place] for place in arrays])
    except Exception:
        return ""
    return next(narrow_equations(program.jaxpr), "")


def narrow_equations(jaxpr: Any) -> Iterator[str]:
    """A line for each equation that rounds to a narrow type."""
    for equation in jaxpr.eqns:
        inner = [part for value in equation.params.values() for part in jaxprs(value)]
        for part in inner:
            yield from narrow_equations(part)
        if inner or equation.primitive.name in EXACT_MOVES:
            continue
        for variable in equation.outvars:
            dtype = getattr(variable.aval, "dtype", None)
            if dtype is None or not is_narrow(dtype):
                continue
            given = getattr(equation.invars[0].aval, "dtype", None) if equation.invars else None
            if equation.primitive.name == "convert_element_type" and given is not None:
                if not jnp.issubdtype(given, jnp.floating):
                    continue  # counts and masks, exact as long as they are small
                yield f"it casts {given} to {dtype}"
            else:
                yield f"its {equation.primitive.name} is in {dtype}"


def jaxprs(value: Any) -> list[Any]:
    """The jaxprs in an equation's parameter."""
    if isinstance(value, (tuple, list)):
        return [part for item in value for part in jaxprs(item)]
    inner = getattr(value, "jaxpr", value)
    return [inner] if hasattr(inner, "eqns") else []


def is_narrow(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.dtype(dtype).itemsize < 8


def narrow_result(results: Mapping[str, Any]) -> str:
    """The first result that is narrower than float64; empty if none is."""
    for name, leaf in results.items():
        if is_array(leaf) and not is_key(leaf) and is_narrow(leaf.dtype):
            return f"{name} is returned in {leaf.dtype}"
    return ""


def exact_report(
    reference: Function,
    candidate: Function,
    arguments: Arguments,
    names: Sequence[str],
    work: Work,
    compare_results: Callable[..., Report],
) -> tuple[Report | None, str]:
    """The comparison in float64, and a line that says that it was made, or why it could not be.

    Errors may be `EXACT` of each leaf's scale, which is measured again, in float64.
    """
    results: dict[str, Named] = {}
    with jax.enable_x64(True):
        try:
            exact = arguments.replaced(cast_up)
            for role, function in (("reference", reference), ("candidate", candidate)):
                narrow = narrow_step(function, exact, names)
                if not narrow:
                    results[role] = call(function, exact, names)
                    narrow = narrow_result(results[role])
                if narrow:
                    return None, f"float64: not compared: the {role} does not compute in it: {narrow}"
            moved = movement(lambda nudged: call(reference, nudged, names), exact, results["reference"])
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            return None, f"float64: not compared: {type(error).__name__}: {lines[0]:.200}"
        report = compare_results(
            results["reference"],
            results["candidate"],
            work,
            relative=EXACT,
            moved=moved,
            python=jnp.float64,
            moves=EXACT / roundoff(jnp.float64),
        )
    return report, f"float64: {len(report.leaves)} leaves compared, {EXACT:.0e} allowed"
