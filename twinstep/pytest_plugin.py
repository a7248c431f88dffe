"""pytest's part of the instruments, loaded by an entry point wherever twinstep is installed.

Flags: `--twinstep-devices N` has the CPU pretend to be N devices, before any conftest.py; `--twinstep-update` writes
snapshots of collectives in place of comparing with them. Fixture: `collectives_snapshot`. `assert a == b` of two lists
of collectives says which differ. This file imports nothing of JAX: projects settle JAX in their conftest.py.
"""

import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

UPDATE = "TWINSTEP_UPDATE"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("twinstep", "twinstep")
    group.addoption(
        "--twinstep-devices", type=int, metavar="N", help="have the CPU pretend to be so many devices, for all tests"
    )
    group.addoption(
        "--twinstep-update", action="store_true", help="write snapshots of collectives in place of comparing with them"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Settle the devices before JAX starts. Each process of pytest-xdist does so for itself."""
    devices = getattr(early_config.known_args_namespace, "twinstep_devices", None)
    if devices is None:
        return
    if devices < 1:
        raise pytest.UsageError(f"--twinstep-devices is {devices}; give at least 1")
    os.environ["JAX_NUM_CPU_DEVICES"] = str(devices)
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:
        import jax

        jax.config.update("jax_platforms", "cpu")
        try:
            jax.config.update("jax_num_cpu_devices", devices)
        except RuntimeError:
            raise pytest.UsageError("--twinstep-devices comes too late: a plugin has started JAX already") from None


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--twinstep-update"):
        os.environ[UPDATE] = "1"


@pytest.fixture
def collectives_snapshot(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """A function that asserts that a step sends what this test's snapshot has; arguments as for `assert_collectives`.

    The snapshot is a file in the folder `snapshots` beside the test's file, named after the test; a test with several
    has to give each a name: `collectives_snapshot(step, *args, name="decode")`.
    """
    names: Counter[str] = Counter()

    def check(step: Any, *args: Any, name: str = "", **options: Any) -> Any:
        __tracebackhide__ = True
        from twinstep import assert_collectives

        names[name] += 1
        if names[name] > 1:
            raise ValueError("this test has compared with its snapshot already; give each a name of its own: name=...")
        test = "-".join(filter(None, (request.path.stem, request.node.name, name)))
        path = request.path.parent / "snapshots" / (re.sub(r"[^\w.-]+", "_", test) + ".json")
        return assert_collectives(step, *args, expected=shortest(path), **options)

    return check


def shortest(path: Path) -> Path:
    """The path from the present folder, if it is inside."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def pytest_assertrepr_compare(op: str, left: Any, right: Any) -> list[str] | None:
    """For two lists of collectives: those that only one of them has."""
    if op != "==" or not (isinstance(left, list) and isinstance(right, list)):
        return None
    entries = sys.modules.get("twinstep.communication.entries")
    if entries is None or not left + right or not all(isinstance(c, entries.Collective) for c in left + right):
        return None
    lines = [f"{len(left)} collectives == {len(right)} collectives"]
    for side, these, those in (("left", left, right), ("right", right, left)):
        lines += [f"only on the {side}: {c}" for c in (Counter(these) - Counter(those)).elements()]
    return lines if len(lines) > 1 else [*lines, "the same, in another order"]
