"""Importing this project changes nothing in the process that imports it."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("twinstep", "shared", "auto_sharding", "explicit_shardmap")
PROGRAM = """
import importlib, json, logging, os, signal, sys, warnings
for library in ("jax", "flax.nnx", "flax.traverse_util", "optax", "orbax.checkpoint", "rich.progress", "tyro", "pooch",
                "jax.experimental.multihost_utils"):
    importlib.import_module(library)  # what libraries do on import is theirs

def settings():
    return {
        **{f"level of logger {name}": logging.getLogger(name).level for name in ["", *logging.root.manager.loggerDict]},
        **{f"sys.{hook}": str(getattr(sys, hook)) for hook in ("excepthook", "unraisablehook", "displayhook", "path")},
        **{f"handler of {number.name}": str(signal.getsignal(number)) for number in signal.valid_signals()
           if isinstance(number, signal.Signals)},
        **{f"environment variable {name}": value for name, value in os.environ.items()},
        **{f"jax.config.{name}": str(value) for name, value in jax.config.values.items()},
        "warnings": str(warnings.filters),
        "backends": str(list(jax._src.xla_bridge._backends)),
        "processes": os.getpid(),
    }

import jax
before = settings()
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
after = settings()
new = {name for name, value in after.items() if name.startswith("level") and name not in before and value == 0}
differing = sorted(name for name in before | after if before.get(name) != after.get(name) and name not in new)
print(json.dumps([f"{name}: {before.get(name)} -> {after.get(name)}" for name in differing]))
"""


def modules() -> list[str]:
    """All modules but those that are command lines."""
    paths = [path.relative_to(ROOT).with_suffix("") for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return sorted(".".join(path.parts).removesuffix(".__init__") for path in paths if path.name != "__main__")


def changes(names: list[str], *, cwd: Path = ROOT) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(names)], cwd=cwd, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_every_module_changes_nothing():
    """No logger level, hook, signal handler, environment variable or JAX setting, and JAX is not started."""
    assert len(modules()) > 50
    assert changes(modules()) == []


def test_changes_are_seen(tmp_path: Path):
    """The test above fails for each kind of change."""
    (tmp_path / "intruder.py").write_text(
        "import logging, os, signal, sys, jax\n"
        "logging.getLogger('absl').setLevel(logging.CRITICAL)\n"
        "sys.unraisablehook = print\n"
        "signal.signal(signal.SIGTERM, print)\n"
        "os.environ['INTRUDER'] = '1'\n"
        "jax.config.update('jax_enable_x64', True)\n"
        "jax.devices()\n"
    )
    found = " ".join(changes(["intruder"], cwd=tmp_path))
    for name in ("logger absl", "unraisablehook", "SIGTERM", "variable INTRUDER", "jax_enable_x64", "backends"):
        assert name in found
