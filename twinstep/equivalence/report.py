"""What a comparison found, and how it reads."""

import io
import math
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from twinstep.equivalence.leaves import Leaf

UNKNOWN = 0.1
"""A leaf that rounding may change by more than this share of its norm is named in the report: it proves little."""


@dataclass(frozen=True)
class Report:
    """What a comparison found. `problems` are differences that have no size: missing leaves, shapes, replicas."""

    leaves: tuple[Leaf, ...]
    """Compared in the functions' own types."""
    problems: tuple[str, ...]
    hints: tuple[str, ...] = ()
    """What is likely to be the cause, if something differs."""
    float64: "Report | None" = None
    """The same of both functions on the same arguments in float64, where that was possible."""
    notes: tuple[str, ...] = ()
    """Which tiers were run, which could not be, and why."""

    @property
    def equal(self) -> bool:
        compared = bool(self.leaves) and not self.problems and all(leaf.equal for leaf in self.leaves)
        return compared and (self.float64 is None or self.float64.equal)

    @property
    def identical(self) -> int:
        """Number of leaves without any difference at all."""
        return sum(leaf.error == 0 for leaf in self.leaves)

    def worst(self, group: str | None = None) -> Leaf:
        """The leaf, of this group if one is named, that used most of its tolerance."""
        return max((leaf for leaf in self.leaves if group in (None, leaf.group)), key=lambda leaf: leaf.used)

    def __str__(self) -> str:
        """A table of the differing leaves (of the closest calls, where none differs), problems and hints first."""
        own = self.leaves and not self.problems and all(leaf.equal for leaf in self.leaves)
        if self.float64 is not None and own and not self.float64.equal:
            return (
                f"{self.float64}\n(in float64; in the functions' own types no leaf differs by more than rounding may)"
            )
        failed = [leaf for leaf in self.leaves if not leaf.equal]
        shown = sorted(failed or self.leaves, key=lambda leaf: -leaf.used)[: 20 if failed else 5]
        verdict = "equal" if self.equal else "NOT EQUAL"
        lines = [f"{verdict}: {len(failed)} of {len(self.leaves)} leaves differ", *self.problems[:4]]
        if len(self.problems) > 4:
            lines.append(f"... and {len(self.problems) - 4} more such lines")
        lines += [f"hint: {hint}" for hint in self.hints]
        lines += [f"note: {note}" for note in (*self.notes, *self.unknown())]
        lines += table(shown) if shown else []
        if len(failed) > len(shown):
            lines.append(f"... and {len(failed) - len(shown)} more")
        return "\n".join(lines)

    def unknown(self) -> list[str]:
        """A line for leaves that may be anything: their exact value is zero, or chaos decides it."""
        names = [
            leaf.name for leaf in self.leaves if leaf.tolerance and leaf.rounding > max(UNKNOWN, 2 * leaf.tolerance)
        ]
        if not names:
            return []
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return [
            f"rounding alone may change {', '.join(names[:3])}{more} by more than a tenth: little is proved of that"
        ]


def table(leaves: list[Leaf]) -> list[str]:
    """The leaves' errors beside what is allowed, as lines of text."""
    columns = Table("leaf", "relative error", "tolerance", "error / tolerance", "ratio", box=None)
    for leaf in leaves:
        ratio = "" if math.isnan(leaf.ratio) else f"{leaf.ratio:.6g}"
        columns.add_row(leaf.name, f"{leaf.error:.2e}", f"{leaf.tolerance:.1e}", f"{leaf.used:.2g}", ratio)
    printed = io.StringIO()
    Console(file=printed, width=120).print(columns)
    return [line.rstrip() for line in printed.getvalue().splitlines()]
