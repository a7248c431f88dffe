"""Benchmarks run on what there is: real devices, or 8 simulated ones, with the settings that users get."""

import jax
import pytest

from shared.runtime import startup

FOUND = startup.start(8)


def pytest_report_header() -> list[str]:
    """What the figures were taken on."""
    return FOUND.describe().splitlines()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The ratios, and what simulated devices can and cannot show."""
    from bench.timing.test_step import RATIOS

    if RATIOS:
        terminalreporter.section("ratios, from interleaved rounds")
        for line in RATIOS:
            terminalreporter.write_line(line)
    if jax.default_backend() == "cpu":
        terminalreporter.write_line(
            "These devices are simulated: they share this machine's cores, so more of them are not faster. Read the "
            "ratios, bytes and counts, not the speed-up."
        )
