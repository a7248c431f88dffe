"""`python -m twinstep check` and `python -m twinstep collectives`: the instruments on functions named by module.

Exit codes: 0, equal, or read; 1, not equal, or not what a snapshot has; 2, the command cannot be done, with a line
that says why.
"""

import argparse
import dataclasses
import importlib
import json
import math
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def parser() -> argparse.ArgumentParser:
    """The command line."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--inputs",
        metavar="MODULE:NAME",
        help="a function without arguments that returns the step's arguments as a tuple (anything else is the only "
        "argument), or such a tuple",
    )
    common.add_argument(
        "--devices", type=int, metavar="N", help="simulate so many devices on the CPU; by default, use those there are"
    )
    common.add_argument("--json", type=Path, metavar="FILE", help="write all that was found to this file")
    common.add_argument("--traceback", action="store_true", help="show where in your code an error was raised")
    top = argparse.ArgumentParser(prog="python -m twinstep", description="Instruments for JAX steps.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    check = commands.add_parser("check", parents=[common], help="are two functions the same, on the same arguments?")
    check.add_argument("reference", metavar="REFERENCE", help="the function that is right, MODULE:NAME")
    check.add_argument("candidate", metavar="CANDIDATE", help="the function to compare with it, MODULE:NAME")
    sends = commands.add_parser(
        "collectives", parents=[common], help="what does a jitted function send between devices?"
    )
    sends.add_argument("step", metavar="STEP", help="a jitted, lowered or compiled function, MODULE:NAME")
    sends.add_argument(
        "--traced", action="store_true", help="read the source's own collectives, not the compiled program's"
    )
    sends.add_argument(
        "--snapshot", type=Path, metavar="FILE", help="compare with what this file has; exit 1 if it differs"
    )
    sends.add_argument("--update", action="store_true", help="write the snapshot in place of comparing with it")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code."""
    options = parser().parse_args(arguments)
    try:
        settle(options.devices)
        return {"check": check, "collectives": sends}[options.command](options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if options.traceback:
            traceback.print_exc()
        first = str(error).strip().splitlines() or [""]
        where = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
        print(f"python -m twinstep: {where}{first[0]}", file=sys.stderr)
        return 2


def settle(devices: int | None) -> None:
    """Have the CPU pretend to be so many devices, before JAX is imported."""
    if devices is None:
        return
    if devices < 1:
        raise ValueError(f"--devices is {devices}; give at least 1")
    os.environ["JAX_NUM_CPU_DEVICES"] = str(devices)
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:  # called from a program that has imported it
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)


def named(text: str) -> Any:
    """What MODULE:NAME names, imported from the current folder or from what is installed. Raises ValueError."""
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise ValueError(f"{text!r} names no function; write it as package.module:name")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"there is no module {error.name!r} in {here} or among what is installed") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{text}: there is no {part!r} in {getattr(found, '__name__', found)}")
        found = getattr(found, part)
    return found


def inputs(options: argparse.Namespace) -> tuple[Any, ...]:
    """The arguments for the functions."""
    if options.inputs is None:
        return ()
    made = named(options.inputs)
    made = made() if callable(made) else made
    return tuple(made) if isinstance(made, tuple | list) and not hasattr(made, "_fields") else (made,)


def check(options: argparse.Namespace) -> int:
    """Compare two functions, and print the report."""
    reference, candidate, arguments = named(options.reference), named(options.candidate), inputs(options)
    file = opened(options.json)
    from twinstep.equivalence.compare import compare

    report = compare(reference, candidate, *arguments)
    print(report)
    save(file, {"equal": report.equal, **dataclasses.asdict(report)})
    return 0 if report.equal else 1


def sends(options: argparse.Namespace) -> int:
    """Print what a function sends, and compare it with a snapshot if there is one."""
    step, arguments = named(options.step), inputs(options)
    if options.update and options.snapshot is None:
        raise ValueError("--update writes a snapshot; give its file with --snapshot")
    if options.traced and options.snapshot is not None:
        raise ValueError("a snapshot is of the compiled program; leave out --traced, or --snapshot")
    file = opened(options.json)
    from twinstep import assert_collectives, collectives, traced_collectives

    differs = None
    if options.snapshot is None:
        found = (traced_collectives if options.traced else collectives)(step, *arguments)
    else:
        try:
            found = assert_collectives(step, *arguments, expected=options.snapshot, update=options.update)
        except AssertionError as error:
            found, differs = collectives(step, *arguments), str(error)
    print_collectives(found)
    data = [
        {**dataclasses.asdict(c), "bytes": c.bytes, "total_bytes": c.total_bytes, "source": c.source} for c in found
    ]
    save(file, {"collectives": data, "differs": differs})
    if differs:
        print(f"\n{differs}")
    return 1 if differs else 0


def print_collectives(found: Sequence[Any]) -> None:
    """A table of all collectives, and their totals."""
    from rich.console import Console
    from rich.table import Table

    from twinstep.communication.account import totals

    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 140)
    if not found:
        console.print("nothing is sent between devices")
        return
    table = Table(box=None, pad_edge=False)
    right = ("devices", "runs", "arrays", "input bytes")
    for heading in ("collective", "axes", *right, "source"):
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    for c in found:
        where = "".join(f", branch {b.index} of {b.branches} of conditional {b.conditional}" for b in c.branch)
        runs = "unknown" if c.count is None else f"{c.count}"
        sizes = (str(c.participants), runs, str(c.arrays), f"{c.bytes:,}")
        table.add_row(c.kind, ", ".join(c.axes) or "other groups", *sizes, c.source + where)
    console.print(table)
    for (kind, axes), total in totals(found).items():
        console.print(f"in all, {kind} over {', '.join(axes) or 'other groups'}: {total} input bytes of each device")


def opened(path: Path | None) -> Any:
    """The file for `--json`, opened before the work, so that a path that cannot be written is said at once."""
    return path.open("w") if path is not None else None


def save(file: Any, data: Any) -> None:
    if file is not None:
        with file:
            json.dump(plain(data), file, indent=2)


def plain(value: Any) -> Any:
    """The value with all that JSON has no word for as text."""
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)
