"""What `python -m bench compare` prints."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
from rich.console import Console
from rich.table import Table

from bench.ledger.report import Account, print_entries
from shared.config import Config
from twinstep.communication.account import total_bytes, total_runs
from twinstep.communication.entries import Collective
from twinstep.communication.memory import Memory
from twinstep.equivalence.leaves import Leaf
from twinstep.equivalence.report import Report

GROUPS = ("loss", "metrics", "logits", "gradients", "parameters", "update")


@dataclass(frozen=True)
class Row:
    """What was found on one number of devices."""

    devices: int
    proofs: dict[str, dict[str, Report]]
    """Tier (`float64`, ..., `trajectory, SGD`), then pair of steps (`oracle / auto`, ...), to their comparison."""
    book: Account
    """The ledger of the timed steps."""
    memory: dict[str, Memory]
    """Twin to what its timed step takes on each device."""
    seconds: dict[str, float]
    """TimedStep to seconds per step, in the fastest round."""
    losses: dict[str, float]
    """Twin to the loss after all timed steps, which is the same number of steps for both."""
    explicit_over_auto: float
    communication_share: dict[str, float]
    """Twin to the share of its step that it would save if sending cost nothing; noise can make it negative."""

    @property
    def equal(self) -> bool:
        return all(report.equal for pairs in self.proofs.values() for report in pairs.values())

    @property
    def as_predicted(self) -> bool:
        """Whether both programs send what is predicted of them, where something is."""
        return all(self.book.as_predicted.values())


def print_report(console: Console, rows: Sequence[Row], config: Config, proof: Config) -> None:
    """The table, one column for each number of devices, and what its figures mean."""
    table = Table(box=None, pad_edge=False)
    for heading in ("", *(f"{row.devices} device{'s' * (row.devices > 1)}" for row in rows)):
        table.add_column(heading, no_wrap=True)
    for dtype in ("float64", "float32"):
        if dtype in rows[0].proofs:
            add_differences(table, rows, dtype)
    add_tiers(table, rows)
    table.add_row("[bold]collectives of a step")
    for name in ("auto", "explicit"):
        table.add_row(f"  {name}", *(kinds(row.book.compiled[name]) for row in rows))
    table.add_row("[bold]input bytes of a device")
    for name in ("auto", "explicit"):
        table.add_row(f"  {name}", *(str(total_bytes(row.book.compiled[name])) for row in rows))
    for name in ("auto", "explicit"):
        table.add_row(f"  predicted for {name}", *(prediction(row.book, name) for row in rows))
    table.add_row("[bold]MiB: arguments + rest, peak")
    for name in ("auto", "explicit"):
        table.add_row(f"  {name}", *(held(row.memory[name]) for row in rows))
    table.add_row("[bold]time of a step, fastest")
    for name in ("auto", "explicit"):
        table.add_row(f"  {name}", *(f"{1e3 * row.seconds[name]:.1f} ms" for row in rows))
    table.add_row("[bold]loss after these steps")
    for name in ("auto", "explicit"):
        table.add_row(f"  {name}", *(f"{row.losses[name]:.5f}" for row in rows))
    table.add_row("[bold]explicit / auto", *(f"{row.explicit_over_auto:.2f}" for row in rows))
    table.add_row("[bold]share of communication")
    for name in ("auto", "explicit"):
        table.add_row(f"  {name}", *(share(row.communication_share[name], row.devices) for row in rows))
    table.add_row("[bold]verdict", *(verdict(row) for row in rows))
    console.print()
    console.print(table)
    console.print(f"\n[bold]who communicates, on {rows[-1].devices} devices")
    print_entries(console, rows[-1].book)
    print_budgets(console, rows[-1])
    console.print(f"\n{explanation(config, proof)}")
    for row in rows:
        for tier, pairs in row.proofs.items():
            for pair, report in pairs.items():
                if not report.equal:
                    console.print(f"\n{row.devices} devices, {tier}, {pair}: {report}", markup=False)


def verdict(row: Row) -> str:
    if not row.equal:
        return "[red]NOT EQUAL"
    return "[green]equal" if row.as_predicted else "[red]equal, but NOT AS PREDICTED"


def add_differences(table: Table, rows: Sequence[Row], dtype: str) -> None:
    """How far apart the steps are when they compute in this type, and how far they may be."""
    table.add_row(f"[bold]largest difference, {dtype}")
    for group in GROUPS:
        if leaves(rows[0], dtype, group):
            table.add_row(f"  {group}", *(difference(row, dtype, group) for row in rows))
    table.add_row("  worst gradient", *(worst_gradient(row, dtype) for row in rows))
    table.add_row("  tolerance", *(f"{gradient_tolerance(row, dtype):.1e}" for row in rows))
    table.add_row("  budget used", *(budget(row, dtype) for row in rows))


def add_tiers(table: Table, rows: Sequence[Row]) -> None:
    """What else must be so; what is tried on the largest number of devices only has a figure only there."""
    table.add_row("[bold]further tiers")
    pairs = [row.proofs["float32"]["auto / explicit"] for row in rows if "float32" in row.proofs]
    table.add_row("  same bits, auto / explicit", *(f"{pair.identical} of {len(pair.leaves)} leaves" for pair in pairs))
    for tier in ("bfloat16", "trajectory, SGD", "trajectory, Adam (smoke)"):
        table.add_row(f"  {tier}, budget used", *(budget(row, tier) for row in rows))
    table.add_row("  replicas", *(identical(row, lambda pair, report: not report.problems) for row in rows))
    table.add_row(
        "  repeated runs", *(identical(row, lambda pair, report: "again" not in pair or report.equal) for row in rows)
    )


def identical(row: Row, condition: Callable[[str, Report], bool]) -> str:
    held = all(condition(pair, report) for pairs in row.proofs.values() for pair, report in pairs.items())
    return "identical" if held else "[red]DIFFER"


def budget(row: Row, tier: str) -> str:
    """The largest share of its tolerance that a leaf used."""
    return f"{max(report.worst().used for report in row.proofs[tier].values()):.1%}" if row.proofs.get(tier) else ""


def difference(row: Row, dtype: str, group: str) -> str:
    """The largest relative difference of a group's leaves among all pairs of steps."""
    return f"{max(leaf.error for leaf in leaves(row, dtype, group)):.1e}"


def worst_gradient(row: Row, dtype: str) -> str:
    """The name of the gradient leaf that differs most."""
    worst = max(leaves(row, dtype, "gradients"), key=lambda leaf: leaf.used)
    return worst.name.removeprefix("gradients.").removeprefix("blocks.")


def gradient_tolerance(row: Row, dtype: str) -> float:
    return max(leaf.tolerance for leaf in leaves(row, dtype, "gradients"))


def leaves(row: Row, dtype: str, group: str) -> list[Leaf]:
    return [leaf for report in row.proofs[dtype].values() for leaf in report.leaves if leaf.group == group]


def held(memory: Memory) -> str:
    arguments, temporary, peak = (size / 2**20 for size in (memory.arguments, memory.temporary, memory.peak))
    return f"{arguments:.1f} + {temporary:.1f}, {peak:.1f}"


def prediction(book: Account, name: str) -> str:
    """The bytes that the strategy table predicts, and whether kinds, axes and bytes are those of the program."""
    predicted = book.predicted[name]
    if predicted is None:
        return "not predicted"
    bytes = sum(traffic.bytes for traffic in predicted)
    return f"{bytes:,}" if book.as_predicted[name] else f"[red]{bytes:,}: WRONG"


def kinds(sends: Sequence[Collective]) -> str:
    """How many collectives of each kind run in a step."""
    counts = {kind: total_runs(c for c in sends if c.kind == kind) for kind in dict.fromkeys(c.kind for c in sends)}
    return ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "none"


def print_budgets(console: Console, row: Row) -> None:
    """Error over tolerance per gradient leaf, worst pair of steps."""
    types = [tier for tier in ("float64", "float32", "bfloat16") if tier in row.proofs]
    table = Table("gradient", *types, box=None, pad_edge=False)
    used: dict[str, dict[str, float]] = {}
    for tier in types:
        for leaf in leaves(row, tier, "gradients"):
            own = used.setdefault(leaf.name.removeprefix("gradients."), {})
            own[tier] = max(own.get(tier, 0.0), leaf.used)
    for name, shares in used.items():
        table.add_row(name, *(f"{shares[tier]:.1%}" for tier in types))
    console.print(f"\n[bold]budget used by each gradient, on {row.devices} devices")
    console.print(table)


def share(value: float, devices: int) -> str:
    return "none" if devices == 1 else f"{value:.0%}"


def explanation(config: Config, proof: Config) -> str:
    """What the figures are, in a few lines."""
    model, small = config.model, proof.model
    simulated = """
These devices are simulated and share this machine's cores: expect no speed-up from more of them. The share of
communication is mostly waiting for one another; bytes and counts are what carries over to real devices."""
    return f"""Differences: the largest between any two of oracle (one device, float64), single-device step and twins,
relative to each leaf's norm. The model has {small.layers} layers, width {small.d_model}, batch {proof.batch},
with dropout, masked tokens, clipping, a step of SGD.
Tolerances and tiers: docs/proof.md. `python -m bench bugs` shows what they catch.
Times: {model.layers} layers, width {model.d_model}, window {model.seq_len}, batch {config.batch}, \
{config.optimizer.optimizer}, {model.dtype}. All steps ran interleaved. Explicit / auto and share are medians
over the rounds, and a few percent of them are noise; the same collectives should cost the same, 0.90 to 1.15.
Share of communication: what a step takes beyond the explicit step with its collectives made local.""" + (
        simulated if jax.default_backend() == "cpu" else ""
    )
