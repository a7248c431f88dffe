"""Which collectives a compiled program holds: kind, mesh axes, bytes, how often, in which branch, and from which line.

For programs of CPUs, GPUs and TPUs. What is not found there is an error; nothing is assumed.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from twinstep.communication import names
from twinstep.communication.entries import Branch, Collective, Operand
from twinstep.communication.groups import AnyMesh, Groups, axes_of, device_groups, linked, pairs, slice_groups
from twinstep.communication.hlo import Program, arrays, attributes
from twinstep.communication.loops import Value, trip_count
from twinstep.communication.meshes import REMEDY, described, meshes_of, the_mesh, traced_meshes

Found = Iterator[Collective]
BETWEEN_SLICES = "_xla_megascale_transfer_type"
"""Attribute of a send between TPU slices, which the runtime carries out as a collective: which one."""


def collectives(step: Any, *args: Any, mesh: AnyMesh | None = None, **kwargs: Any) -> list[Collective]:
    """What a step sends, from its compiled program, in the order in which it is scheduled.

    step: a jitted function, which is lowered and compiled for these arguments (arrays or `jax.ShapeDtypeStruct`s, with
    their shardings), or what `lower` or `compile` of one returned. mesh: whose axes to speak of; by default that of
    the arguments, of the function's `shard_map`s and constraints, or of the compiled program's shardings. Groups of
    one device, which send nothing, are left out. Raises ValueError for a function that is not jitted, where the mesh
    cannot be found, and for a program that cannot be read.
    """
    return read_step(step, *args, mesh=mesh, **kwargs)[0]


def read_step(
    step: Any, *args: Any, mesh: AnyMesh | None = None, **kwargs: Any
) -> tuple[list[Collective], AnyMesh | None]:
    """As `collectives`, with the mesh that was given or found."""
    known: list[AnyMesh] = [] if mesh is None else [mesh]
    if not hasattr(step, "runtime_executable") and not hasattr(step, "compile"):
        if not hasattr(step, "lower"):
            raise ValueError(f"{name_of(step)} is not jitted; give jax.jit of it, with arguments")
        if mesh is None:
            known += meshes_of((args, kwargs))
            trace: Any = getattr(step, "trace", None)  # jax.pmap's functions have none
            known += traced_meshes(trace(*args, **kwargs).jaxpr) if trace else ()
        step = compile_readable(step, *args, **kwargs)
    elif args or kwargs:
        raise ValueError("the step is lowered or compiled already, for its own arguments; give it alone")
    compile: Any = getattr(step, "compile", None)
    step = compile() if compile else step
    if mesh is None:
        known += meshes_of((step.input_shardings, step.output_shardings))
    executable: Any = step.runtime_executable()
    modules = [module.as_serialized_hlo_module_proto() for module in executable.hlo_modules()]
    mesh = the_mesh(known)
    return [entry for module in modules for entry in read_program(module, mesh)], mesh


def compile_readable(function: Any, *arguments: Any, **options: Any) -> jax.stages.Compiled:
    """Lower and compile a jitted function, with its own lines of source in the program.

    JAX's persistent cache would else give a program of another day, whose lines are those of that day.
    """
    name = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        return function.lower(*arguments, **options).compile()
    finally:
        jax.config.update(name, before)


def name_of(step: Any) -> str:
    return getattr(step, "__name__", type(step).__name__)


def read_program(serialized: bytes, mesh: AnyMesh | None) -> list[Collective]:
    """The collectives of a serialized `HloModuleProto`; positions in it are those of the mesh's devices, in order.

    Raises ValueError for collectives without a mesh to name their axes, or with one of another size.
    """
    return [entry for entry in Reader(Program(serialized), mesh).entry() if entry.participants > 1]


class Reader:
    """A walk through one program."""

    def __init__(self, program: Program, mesh: AnyMesh | None):
        self.program, self.mesh = program, mesh
        self.conditionals = itertools.count(1)
        self.begun: set[str] = set()

    def entry(self) -> Found:
        return self.walk(self.program.module.entry_computation_id, 1, ())

    def walk(
        self, computation: int, count: int | None, branch: tuple[Branch, ...], caller: Value | None = None
    ) -> Found:
        """The collectives of a computation that runs so often, and of all that it calls."""
        for instruction in self.program.in_order(computation):
            opcode, called = instruction.opcode, instruction.called_computation_ids
            if opcode.endswith("-done") or opcode in ("async-update", "recv"):
                continue  # the other end of what began at a start or a send
            if opcode == "while":
                turns = trip_count(self.program, Value(instruction, caller))
                for inner, more in zip(called, (0, 1), strict=True):  # the body, and the condition, which ends the loop
                    runs = None if turns is None or count is None else (turns + more) * count
                    yield from self.walk(inner, runs, branch)
            elif opcode == "conditional":
                number = next(self.conditionals)
                for index, inner in enumerate(called):
                    yield from self.walk(inner, count, (*branch, Branch(number, index, len(called))))
            elif kind := self.kind(instruction, computation):
                if not self.continues(instruction, computation):
                    yield self.describe(Value(instruction, caller), kind, count, branch)
            else:
                for inner in called:
                    yield from self.walk(inner, count, branch, Value(instruction, caller))

    def kind(self, instruction: Any, computation: int) -> str | None:
        """What kind of collective an instruction is or begins; None for others.

        A TPU's reduce_scatter is a fusion, called all-reduce-scatter, of an all-reduce and the slice that a device
        keeps.
        """
        opcode = instruction.opcode.removesuffix("-start")
        if opcode == "send" and instruction.is_host_transfer:  # to the host, or to other slices by way of it
            return attributes(instruction).get(BETWEEN_SLICES, "").lower() or None
        if opcode == "send":
            return "send"
        if opcode == "all-reduce" and self.program.computations[computation].name.startswith("all-reduce-scatter"):
            return "reduce_scatter"
        between = opcode.startswith(("all-", "collective-", "ragged-all-", "reduce-scatter"))
        return opcode.replace("-", "_") if between else None

    def continues(self, instruction: Any, computation: int) -> bool:
        """Whether a TPU's asynchronous collective was counted where it began.

        It stands in several fusions, with the same `chain_id`: in that which starts it, beside the computation that
        hides it, and in that which ends it.
        """
        chain = attributes(instruction).get("chain_id")
        if chain is None:
            return False
        inside = self.program.computations[computation].instructions
        if any(other.custom_call_target == "AsyncCollectiveStart" for other in inside):
            self.begun.add(chain)
            return False
        if chain not in self.begun:
            raise ValueError(f"cannot read where {instruction.name} begins: no fusion starts its chain {chain}")
        return True

    def describe(self, value: Value, kind: str, count: int | None, branch: tuple[Branch, ...]) -> Collective:
        """One collective in the terms of the mesh."""
        instruction = value.instruction
        groups = self.groups(instruction, kind)
        participants = max(len(group) for group in groups)
        operands = self.program.operands(instruction)
        only_first = instruction.opcode == "send" or kind == "ragged_all_to_all"  # the others say where and how much
        sent = operands[:1] if only_first else operands
        return Collective(
            kind=kind,
            axes=self.axes(groups, instruction) if participants > 1 else (),
            participants=participants,
            operands=tuple(self.operands(value, sent)),
            count=count,
            branch=branch,
        )

    def groups(self, instruction: Any, kind: str) -> Groups:
        devices = math.prod(self.mesh.shape.values()) if self.mesh else 1
        if BETWEEN_SLICES in attributes(instruction):
            return slice_groups(instruction, devices)
        if kind in ("collective_permute", "send"):
            return linked(pairs(instruction))
        return device_groups(instruction, devices)

    def axes(self, groups: Groups, instruction: Any) -> tuple[str, ...]:
        if self.mesh is None:
            raise ValueError(
                f"the program has collectives ({instruction.name}), and its mesh cannot be found; {REMEDY}"
            )
        devices = math.prod(self.mesh.shape.values())
        if max(map(max, groups)) >= devices:
            raise ValueError(
                f"the program is for more devices than the {devices} of the mesh {described(self.mesh)}; {REMEDY}"
            )
        return axes_of(groups, self.mesh)

    def operands(self, value: Value, sent: Iterable[Any]) -> Iterator[Operand]:
        """The arrays that enter a collective, with the lines that made them, or that of the call written by name."""
        instruction, index = value.instruction, self.program.module.stack_frame_index
        around = value.caller.instruction.metadata if value.caller else instruction.metadata
        own = instruction.metadata if instruction.metadata.op_name else around
        by_name = names.written_by_name(own.op_name)
        for operand in sent:
            maker = outside(self.program, Value(operand, value.caller))
            metadata = own if by_name or maker.opcode == "parameter" or not maker.metadata.op_name else maker.metadata
            for dtype, bytes in arrays(operand.shape):
                source = names.source(metadata, index) or instruction.name
                yield Operand(bytes, dtype, names.scope(metadata.op_name), source)


def outside(program: Program, value: Value) -> Any:
    """The instruction that a parameter of a fusion or a call stands for; others as they are."""
    while value.opcode == "parameter" and value.caller is not None:
        caller = value.caller
        number = caller.instruction.operand_ids[value.instruction.parameter_number]
        value = Value(program.instructions[number], caller.caller)
    return value.instruction
