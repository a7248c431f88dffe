"""Which collectives a compiled program holds: kind, mesh axes, bytes, how often, and who asked for them.

The program is read as a structure, not as text: the executable's HLO is turned into StableHLO operations, which JAX's
own MLIR bindings walk. (Text and regular expressions break from one release to the next. Only source positions, for
which the bindings have no accessor, are cut out of MLIR's printed locations.)
"""

import itertools
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend.mlir import hlo_to_stablehlo, ir
from jax.interpreters import mlir
from jax.sharding import Mesh

from shared.model.transformer import SCOPES
from twinstep.communication.account import KINDS, PRIMITIVES, Collective, Operand


def compile_readable(function: Any, *arguments: Any) -> jax.stages.Compiled:
    """Lower and compile a jitted function so that `collectives` can read the program.

    XLA may write the groups of devices as mesh axes, of which its exporter to StableHLO loses some and refuses
    others; here it is asked to list them. JAX before 0.11 has no setting of its own for it.
    """
    settings = {"jax_compilation_cache_include_metadata_in_key": True}  # or source lines may be those of another day
    if hasattr(jax.config, "jax_use_rgv3"):
        settings["jax_use_rgv3"] = False
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for setting in settings.items():
            jax.config.update(*setting)
        return function.lower(*arguments).compile(compiler_options={"xla_enable_rgv3_materialization": False})
    finally:
        for setting in before.items():
            jax.config.update(*setting)


def collectives(compiled: jax.stages.Compiled, mesh: Mesh) -> list[Collective]:
    """The collectives of a program made by `compile_readable` for this mesh, in program order.

    Groups of one device, in which nothing is sent, are left out.
    """
    found = []
    executable: Any = compiled.runtime_executable()
    for module in executable.hlo_modules():
        stablehlo = hlo_to_stablehlo(module.as_serialized_hlo_module_proto())
        with mlir.make_ir_context():
            program = ir.Module.parse(stablehlo)
            functions = {str(op.attributes["sym_name"]).strip('"'): op.operation for op in program.body.operations}
            for op, count in operations(functions["main"], functions, 1):
                kind = op.name.split(".")[-1]
                if kind in KINDS:
                    collective = describe(op, kind, count, mesh)
                    if collective.participants > 1:
                        found.append(collective)
    return found


def operations(op: Any, functions: dict[str, Any], count: int | None) -> Iterator[tuple[Any, int | None]]:
    """Every operation inside `op`, through the functions it calls, with how often it runs."""
    for region in op.regions:
        for block in region.blocks:
            for wrapped in block.operations:
                inner = wrapped.operation
                yield inner, count
                if inner.name == "func.call":
                    callee = functions[str(inner.attributes["callee"]).strip('@"')]
                    yield from operations(callee, functions, count)
                turns = trip_count(inner) if inner.name == "stablehlo.while" else 1
                yield from operations(inner, functions, turns * count if turns and count else None)


def trip_count(loop: Any) -> int | None:
    """Turns of a loop of the form that `lax.scan` and `fori_loop` make: from 0 by 1 while less than a constant.

    None for any other. XLA may put the comparison into a fusion; its operands are followed out of it.
    """
    condition = loop.regions[0].blocks[0]
    compares = []
    for wrapped in condition.operations:
        outer = wrapped.operation
        for op, _ in itertools.chain([(outer, 1)], operations(outer, {}, 1)):
            if op.name == "stablehlo.compare":
                compares.append((op, outer))
    if len(compares) != 1 or "LT" not in str(compares[0][0].attributes["comparison_direction"]):
        return None
    compare, outer = compares[0]

    def followed(value: Any) -> Any:
        argument = value.owner if isinstance(value.owner, ir.Block) else None
        if argument is not None and compare is not outer:
            return outer.operands[ir.BlockArgument(value).arg_number]
        return value

    counter, limit = (followed(value) for value in compare.operands)
    end = constant(limit)
    start = (
        constant(loop.operands[ir.BlockArgument(counter).arg_number]) if isinstance(counter.owner, ir.Block) else None
    )
    return end if start == 0 else None


def constant(value: Any) -> int | None:
    """The value of an integer constant, or None."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        return None
    if owner.name == "stablehlo.constant":
        return int(np.asarray(ir.DenseIntElementsAttr(owner.attributes["value"])).ravel()[0])
    if owner.name in ("stablehlo.copy", "mhlo.copy", "stablehlo.convert", "stablehlo.bitcast_convert", "mhlo.bitcast"):
        return constant(owner.operands[0])
    return None


def describe(op: Any, kind: str, count: int | None, mesh: Mesh) -> Collective:
    """One collective operation of StableHLO in the terms of the mesh."""
    if kind == "collective_permute":
        pairs = np.asarray(op.attributes["source_target_pairs"])
        groups = linked(pairs.tolist())
    else:
        if not str(op.attributes["replica_groups"]).startswith("dense"):
            raise ValueError(f"cannot read which devices take part in {op.name}; compile with compile_readable")
        groups = [[int(i) for i in row if i >= 0] for row in np.asarray(op.attributes["replica_groups"])]
    by_name = asked_for_by_name(str(op.location))
    operands = []
    for value in op.operands:
        type = ir.RankedTensorType(value.type)
        location = str(op.location if by_name or isinstance(value.owner, ir.Block) else value.owner.location)
        size = math.prod(type.shape) * element_bytes(type.element_type)
        operands.append(Operand(size, scope(location), source(location)))
    return Collective(
        kind=kind,
        axes=axes_of(groups, mesh),
        participants=max(len(group) for group in groups),
        operands=tuple(operands),
        count=count,
    )


def element_bytes(element: Any) -> int:
    """Bytes of one number of this MLIR type; complex numbers are two."""
    name = str(element)
    bits = int(re.findall(r"\d+", name)[0])
    return max(bits * (2 if name.startswith("complex") else 1) // 8, 1)


def linked(pairs: list[list[int]]) -> list[list[int]]:
    """Groups of devices that a permutation connects."""
    groups: list[set[int]] = []
    for pair in pairs:
        touched = [group for group in groups if group & set(pair)]
        groups = [group for group in groups if group not in touched] + [set(pair).union(*touched)]
    return [sorted(group) for group in groups]


def axes_of(groups: list[list[int]], mesh: Mesh) -> tuple[str, ...]:
    """The fewest mesh axes along which these groups of device positions lie."""
    positions = np.arange(mesh.size).reshape(mesh.devices.shape)
    wanted = {frozenset(group) for group in groups}
    for number in range(1, len(mesh.axis_names) + 1):
        for chosen in itertools.combinations(range(len(mesh.axis_names)), number):
            size = math.prod(mesh.devices.shape[axis] for axis in chosen)
            rows = np.moveaxis(positions, chosen, range(-number, 0)).reshape(-1, size)
            if wanted <= {frozenset(row.tolist()) for row in rows}:
                return tuple(mesh.axis_names[axis] for axis in chosen)
    return ()


def asked_for_by_name(location: str) -> bool:
    """Whether the operation comes from a `lax` collective: its name, from JAX, ends with that primitive's.

    Of merged operations XLA joins the names: `jit(f)/(shard_map/psum:shard_map/psum)`.
    """
    return all(name.split("/")[-1].strip("()") in PRIMITIVES for name in name_of(location).split(":"))


def name_of(location: str) -> str:
    """The operation's name in a printed MLIR location: `jit(train_step)/transpose(jvp(attention))/dot_general`."""
    name = re.match(r'loc\("([^"]+)"', location)
    return name.group(1) if name else ""


def scope(location: str) -> str:
    """The `jax.named_scope`s in an operation's name, joined by dots."""
    *words, _ = re.split(r"[/()]+", name_of(location).strip(")")) or [""]
    return ".".join(word for word in words if word in SCOPES)


def relative(path: Path | str) -> Path:
    """The path from the present folder, if it is inside."""
    return Path(path).relative_to(Path.cwd()) if Path(path).is_relative_to(Path.cwd()) else Path(path)


def source(location: str) -> str:
    """file:line of the innermost frame outside installed packages, from a printed MLIR location."""
    for file, line in re.findall(r'"([^"]+)":(\d+):\d+', location):
        path = Path(file)
        if "site-packages" in path.parts or path.is_relative_to(sys.prefix):
            continue
        return f"{relative(path)}:{line}"
    return name_of(location) or "unknown"
