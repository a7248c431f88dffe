"""The ledger of one training step on one mesh: predicted, written, compiled, and the twins side by side."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

import explicit_shardmap
from shared.config import Config
from shared.placement.mesh import make_mesh
from shared.placement.strategies import degrees_of, label
from shared.placement.traffic import Traffic, predicted_traffic, traffic_totals
from twinstep import traced_collectives
from twinstep.communication.account import (
    Key,
    Match,
    Total,
    bounds,
    by_key,
    match_collectives,
    total_bytes,
    total_on_wire,
    total_runs,
    totals,
)
from twinstep.communication.entries import Collective


@dataclass(frozen=True)
class Account:
    """The ledger of one strategy on one mesh."""

    predicted: Mapping[str, list[Traffic] | None]
    """Twin to the strategy table's formula, or None where it has none."""
    compiled: Mapping[str, list[Collective]]
    """Twin to the collectives of its compiled training step."""
    traced: list[Collective]
    """What is written in the explicit twin's source."""
    matches: Sequence[Match]

    @property
    def as_predicted(self) -> Mapping[str, bool]:
        """Twin to whether the compiled program holds to the prediction, in kinds, axes and bytes; if there is one."""
        return {
            name: traffic_totals(predicted) == totals(self.compiled[name])
            for name, predicted in self.predicted.items()
            if predicted is not None
        }


def account(config: Config, devices: int, compiled: Mapping[str, list[Collective]]) -> Account:
    """Put the twins' collectives beside the prediction and each other."""
    twin = explicit_shardmap.build(config, make_mesh(config.strategy, devices, config.mesh))
    traced = traced_collectives(twin.train_step, *twin.shapes(), mesh=twin.mesh)
    predicted = {name: predicted_traffic(config, twin.mesh.shape, name) for name in compiled}
    return Account(predicted, compiled, traced, match_collectives(compiled["explicit"], compiled["auto"]))


def as_data(book: Account) -> dict[str, Any]:
    """The account as JSON-ready data."""

    def entry(c: Collective) -> dict[str, Any]:
        return {
            **dataclasses.asdict(c),
            "bytes": c.bytes,
            "total_bytes": c.total_bytes,
            "sent_per_device": total_on_wire([c]).most,
            "source": c.source,
        }

    return {
        "predicted": {
            name: None if entries is None else [traffic._asdict() for traffic in entries]
            for name, entries in book.predicted.items()
        },
        "compiled": {name: [entry(c) for c in entries] for name, entries in book.compiled.items()},
        "as_predicted": book.as_predicted,
        "traced": [entry(c) for c in book.traced],
        "matches": [
            {
                "verdict": match.verdict,
                "explicit": [entry(c) for c in match.first],
                "auto": [entry(c) for c in match.second],
            }
            for match in book.matches
        ],
    }


def print_account(console: Console, config: Config, devices: int, book: Account) -> None:
    """The entries of both twins, the prediction, and how the twins' collectives match."""
    degrees = " x ".join(f"{axis} {size}" for axis, size in degrees_of(config, devices).items())
    console.print(f"\n[bold]one training step, {label(config)} over {degrees}")
    print_entries(console, book)
    console.print()
    for name, predicted in book.predicted.items():
        if predicted is None:
            console.print(f"predicted for {name}: not predicted, the partitioner decides")
        else:
            verdict = "[green]as compiled" if book.as_predicted[name] else "[red]NOT as compiled"
            console.print(f"predicted for {name}: {describe_totals(traffic_totals(predicted))}: {verdict}")
    verdict = (
        "[green]as compiled"
        if totals(book.traced) == totals(book.compiled["explicit"])
        else "[yellow]compiled differently"
    )
    console.print(f"written in explicit's source: {describe_totals(totals(book.traced))}: {verdict}")
    console.print("\n[bold]explicit / in its place, auto")
    for match in book.matches:
        console.print(f"{match.verdict}: {describe_side(match.first)} / {describe_side(match.second)}")


def describe_side(side: Sequence[Collective]) -> str:
    """How many of what, in words."""
    return (
        ", ".join(
            f"{total_runs(group)} {kind} over {', '.join(axes) or 'other groups'}, {total_bytes(group)} bytes"
            for (kind, axes), group in by_key(side).items()
        )
        or "nothing"
    )


def describe_totals(found: Mapping[Key, Total]) -> str:
    """Input bytes, by kind and axes, in words."""
    return (
        ", ".join(
            f"{kind} over {', '.join(axes) or 'other groups'} {total} bytes" for (kind, axes), total in found.items()
        )
        or "nothing"
    )


def print_entries(console: Console, book: Account) -> None:
    """Every collective of both compiled steps, those from the same lines as one."""
    table = Table(box=None, pad_edge=False)
    right = ("devices", "runs", "arrays", "input bytes", "bytes on the wire")
    for heading in ("twin", "collective", "axes", *right, "source"):
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    for name, entries in book.compiled.items():
        alike: dict[tuple[str, tuple[str, ...], str], list[Collective]] = {}
        for c in entries:
            alike.setdefault((c.kind, c.axes, c.source), []).append(c)
        for (kind, axes, source), group in alike.items():
            arrays = bounds(group, lambda c: c.arrays)
            sizes = (total_runs(group), arrays, total_bytes(group), total_on_wire(group))
            columns = (str(group[0].participants), *map(str, sizes))
            table.add_row(name, kind, ", ".join(axes) or "others", *columns, source + scopes(group))
    console.print(table)


def scopes(group: Sequence[Collective]) -> str:
    """The parts of the model of which the operations' names tell."""
    found = dict.fromkeys(operand.scope for c in group for operand in c.operands if operand.scope)
    return f" ({', '.join(found)})" if found else ""
