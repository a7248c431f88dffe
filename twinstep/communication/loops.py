"""How often the body of a compiled loop runs.

XLA notes the number where it knows it. Elsewhere (XLA notes nothing for TPUs) it is worked out for loops of the form
that `lax.scan` and `lax.fori_loop` make: a whole number begins at a constant, a constant is added to it in each turn,
and the loop goes on while it compares with another constant. Of any other loop the number is unknown: nothing is
guessed.
"""

import json
from dataclasses import dataclass
from typing import Any

from twinstep.communication.hlo import TYPES, Program

FLIPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}
UNCHANGING = ("copy", "bitcast", "reshape", "convert", "bitcast-convert", "optimization-barrier", "copy-done")
"""Operations whose result is their operand, as far as a small whole number goes."""


@dataclass(frozen=True)
class Value:
    """An instruction, and the fusion or call in whose computation it stands (None: in a loop's, or the program's)."""

    instruction: Any
    caller: "Value | None" = None

    @property
    def opcode(self) -> str:
        return self.instruction.opcode


def trip_count(program: Program, loop: Value) -> int | None:
    """Runs of the body of a `while` instruction in one run of the loop; None if it cannot be known."""
    noted = noted_trip_count(loop.instruction)
    return worked_out(program, loop) if noted is None else noted


def noted_trip_count(loop: Any) -> int | None:
    """What XLA has found out, if it has."""
    try:
        return int(json.loads(loop.backend_config)["known_trip_count"]["n"])
    except (ValueError, LookupError, TypeError):  # none, or a configuration of another form
        return None


def worked_out(program: Program, loop: Value) -> int | None:
    """As `trip_count`, from start, step and comparison."""
    body, condition = loop.instruction.called_computation_ids
    compare = resolved(program, Value(program.root(condition)))
    if compare.opcode != "compare":
        return None
    left, right = (operand(program, compare, n) for n in (0, 1))
    direction = compare.instruction.comparison_direction
    if direction not in FLIPPED:
        return None
    end = bound(program, right, loop, body)
    if end is None:
        end, left, direction = bound(program, left, loop, body), right, FLIPPED[direction]
    counter = carried(program, left)
    if end is None or counter is None:
        return None
    start, step = initial(program, loop, counter), step_of(program, body, counter)
    if start is None or step is None:
        return None
    return turns(start, end, step, direction, TYPES[left.instruction.shape.element_type])


def turns(start: int, end: int, step: int, direction: str, element: tuple[str, int]) -> int | None:
    """Turns of a loop that counts from start by step while the count compares so with end; None if it never ends.

    element: name and bits of the count's type. A count that would leave the type's range wraps around: unknown.
    """
    if direction == "NE":
        found = (end - start) // step if step and (end - start) % step == 0 else -1
        return found if found >= 0 else None
    if direction in ("GT", "GE"):
        start, end, step = -start, -end, -step
    last = end if direction in ("LT", "GT") else end + 1
    if start >= last:
        return 0
    if step <= 0:
        return None
    count = -(-(last - start) // step)
    name, bits = element
    beyond = start + count * step
    least, most = (0, 2**bits) if name.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    return count if least <= (beyond if direction in ("LT", "LE") else -beyond) < most else None


def operand(program: Program, value: Value, number: int) -> Value:
    """What an operand is, found through all that only passes it on."""
    return resolved(program, Value(program.instructions[value.instruction.operand_ids[number]], value.caller))


def resolved(program: Program, value: Value) -> Value:
    """What a value is, through copies, fusions, calls and tuples."""
    while True:
        instruction = value.instruction
        if value.opcode in UNCHANGING:
            value = Value(program.instructions[instruction.operand_ids[0]], value.caller)
        elif value.opcode in ("fusion", "call"):
            value = Value(program.root(instruction.called_computation_ids[0]), value)
        elif value.opcode == "parameter" and value.caller is not None:
            outer = value.caller
            value = Value(
                program.instructions[outer.instruction.operand_ids[instruction.parameter_number]], outer.caller
            )
        elif value.opcode == "get-tuple-element":
            whole = operand(program, value, 0)
            if whole.opcode != "tuple":
                return value
            value = Value(program.instructions[whole.instruction.operand_ids[instruction.tuple_index]], whole.caller)
        else:
            return value


def constant(value: Value) -> int | None:
    """The value of a whole number that is a constant, else None."""
    instruction = value.instruction
    if value.opcode != "constant" or instruction.shape.element_type not in TYPES:
        return None
    name, bits = TYPES[instruction.shape.element_type]
    field = {"int": "s", "uint": "u"}.get(name.rstrip("0123456789"))
    if field is None or bits < 8 or instruction.shape.dimensions:
        return None
    held = getattr(instruction.literal, f"{field}{bits}s")
    if isinstance(held, bytes):
        return int.from_bytes(held, "little", signed=field == "s") if held else None
    return int(held[0]) if held else None


def carried(program: Program, value: Value) -> int | None:
    """Which part of the loop's state a resolved value is, if it is one."""
    if value.opcode != "get-tuple-element":
        return None
    whole = operand(program, value, 0)
    return value.instruction.tuple_index if whole.opcode == "parameter" and whole.caller is None else None


def initial(program: Program, loop: Value, part: int) -> int | None:
    """The constant that a part of the loop's state begins with, else None."""
    state = operand(program, loop, 0)
    return constant(operand(program, state, part)) if state.opcode == "tuple" else None


def after_turn(program: Program, body: int, part: int) -> Value | None:
    """What the body makes of a part of the loop's state."""
    state = resolved(program, Value(program.root(body)))
    return operand(program, state, part) if state.opcode == "tuple" else None


def step_of(program: Program, body: int, part: int) -> int | None:
    """The constant that each turn adds to a part of the loop's state, else None."""
    after = after_turn(program, body, part)
    if after is None or after.opcode not in ("add", "subtract"):
        return None
    left, right = (operand(program, after, n) for n in (0, 1))
    if after.opcode == "subtract":
        step = constant(right) if carried(program, left) == part else None
        return None if step is None else -step
    if carried(program, left) == part:
        return constant(right)
    return constant(left) if carried(program, right) == part else None


def bound(program: Program, value: Value, loop: Value, body: int) -> int | None:
    """The constant that a side of the comparison is: written there, or carried through all turns unchanged."""
    part = carried(program, value)
    if part is None:
        return constant(value)
    after = after_turn(program, body, part)
    return initial(program, loop, part) if after is not None and carried(program, after) == part else None
