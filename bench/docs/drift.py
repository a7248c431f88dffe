"""How far one printed output is from another: in its numbers, and in its words."""

import re

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


def drift(old: str, new: str) -> str:
    """One line on how the new output differs from the old one; empty if it does not."""
    if old == new:
        return ""
    if words(old) != words(new):
        before, after = old.splitlines(), new.splitlines()
        changed = sum(line not in before for line in after)
        return f"{changed} of {len(after)} lines differ, in their words too"
    pairs = list(zip(numbers(old), numbers(new), strict=True))
    changes = [abs(b - a) / max(abs(a), abs(b)) for a, b in pairs if a != b]
    largest = f", the largest by {max(changes):.0%}" if changes else ""
    return f"{len(changes)} of {len(pairs)} numbers differ{largest}"


def words(text: str) -> list[str]:
    """The text without its numbers and blanks."""
    return NUMBER.sub("#", text).split()


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in NUMBER.findall(text)]
