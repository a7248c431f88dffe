"""The wheel: what it contains, and that it works in an empty environment, away from the checkout."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from twinstep import assert_collectives, assert_equivalent, collectives, traced_collectives
import jax, jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 4)
mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,))
def mean(x, y): return {"loss": (x * y).mean()}
def local(x, y): return jax.lax.pmean(mean(x, y), "data")
step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P()))
x = jnp.linspace(0.0, 1.0, 8)
assert_equivalent(jax.jit(mean), step, x, x)
(found,), (written,) = collectives(step, x, x), traced_collectives(step, x, x)
for one in (found, written):
    assert (one.kind, one.axes, one.bytes) == ("all_reduce", ("data",), 4)
assert "site-packages" in sys.modules["twinstep"].__file__, sys.modules["twinstep"].__file__
assert "flax" not in sys.modules and "optax" not in sys.modules
import shared
assert shared.OWNER == "another project"
print("works")
"""


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(tmp_path: Path):
    """Built, installed with nothing but what it asks for, and used in a folder that has a `shared` of its own."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    if run(*pip, "download", "--no-deps", "--dest", tmp_path / "index", "uv_build>=0.9", cwd=tmp_path).returncode:
        pytest.skip("no package index to take the build backend from")
    built = run(*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path / "wheels", ROOT, cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    (wheel,) = (tmp_path / "wheels").iterdir()
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        tops = {name.split("/")[0] for name in names}
        (metadata,) = [packed.read(name).decode() for name in names if name.endswith(".dist-info/METADATA")]
    assert {top for top in tops if not top.endswith(".dist-info")} == {"twinstep"}
    needed = {line.split()[1].split(">")[0] for line in metadata.splitlines() if line.startswith("Requires-Dist")}
    assert {name for name in needed if "matplotlib" not in name} == {"jax", "numpy", "protobuf", "rich"}
    environment = tmp_path / "environment"
    assert run(sys.executable, "-m", "venv", environment, cwd=tmp_path).returncode == 0
    python = environment / "bin" / "python"
    installed = run(python, "-m", "pip", "install", "--no-compile", wheel, cwd=tmp_path)
    assert installed.returncode == 0, installed.stderr
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "shared").mkdir(parents=True)
    (elsewhere / "shared" / "__init__.py").write_text('OWNER = "another project"')
    (elsewhere / "use.py").write_text(PROGRAM)
    used = run(python, "use.py", cwd=elsewhere)
    assert used.stdout == "works\n", used.stderr
    help_ = run(python, "-m", "twinstep", "--help", cwd=elsewhere)
    assert "collectives" in help_.stdout, help_.stderr
