"""What is settled before JAX starts. Each case needs a process that has not started it."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from shared.runtime import startup

JAX_DEFAULTS = "JAX's defaults"
ROOT = Path(__file__).parents[3]
SHOW = (
    "from shared.runtime import startup; found = startup.start(2); "
    "print(found.platform, found.devices, found.cpu_settings)"
)


def started(program: str = SHOW, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_accepted_settings_are_applied_and_named():
    """JAX aborts on a flag it does not know; here it has to compile a product with all that are accepted."""
    product = "; import jax.numpy as jnp; x = jnp.ones((64, 64)); print(float((x @ x).sum()))"
    first, last = started(SHOW + product, JAX_PLATFORMS="cpu").splitlines()
    assert first == f"cpu 2 {' '.join(startup.accepted_settings()) or JAX_DEFAULTS}"
    assert float(last) == 64**3


def test_the_users_own_flags_and_devices_are_kept():
    shown = started(XLA_FLAGS="--xla_cpu_prefer_vector_width=128", JAX_NUM_CPU_DEVICES="3", JAX_PLATFORMS="cpu")
    assert shown == "cpu 3 --xla_cpu_prefer_vector_width=128 (from XLA_FLAGS)"


def test_no_settings_are_applied_where_an_accelerator_is_looked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    assert startup.accelerator_installed()
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert not startup.accelerator_installed()


def test_settings_are_those_that_version_and_processor_take(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(startup, "processor_has", lambda feature: feature == "avx512f")
    for version in ("0.10.2", "0.11.2", "0.12.3"):
        monkeypatch.setattr("importlib.metadata.version", lambda name, version=version: version)
        assert startup.accepted_settings() == ["--xla_cpu_prefer_vector_width=512"]
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.13.0")
    assert startup.accepted_settings() == []
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.12.3")
    monkeypatch.setattr(startup, "processor_has", lambda feature: False)
    assert startup.accepted_settings() == []


def test_a_second_start_describes_the_first():
    """The tests' own JAX has 8 devices and was started without CPU settings; nothing of that changes."""
    assert startup.jax_has_started()
    before = dict(jax.config.values), dict(os.environ)
    assert startup.start(3, float64=True).devices == 8
    assert (dict(jax.config.values), dict(os.environ)) == before


def test_settings_that_could_make_the_twins_differ_are_settled(monkeypatch: pytest.MonkeyPatch):
    others = {
        "jax_default_prng_impl": "rbg",
        "jax_threefry_partitionable": False,
        "jax_random_seed_offset": 1,
        "jax_numpy_dtype_promotion": "strict",
        "jax_numpy_rank_promotion": "raise",
        "jax_use_shardy_partitioner": False,
    }
    assert others.keys() == startup.SETTLED.keys()
    for name, value in {**others, "jax_enable_x64": True}.items():
        jax.config.update(name, value)
    startup.settle()
    assert {name: getattr(jax.config, name) for name in others} == dict(startup.SETTLED)
    assert not jax.config.jax_enable_x64
    with jax.disable_jit(), pytest.raises(ValueError, match="JAX_DISABLE_JIT is set, but the twins are compiled"):
        startup.settle()


@pytest.mark.parametrize("error", [AssertionError(), RuntimeError("Unknown backend\nmore")])
def test_a_platform_that_cannot_start_is_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch):
    def fail() -> None:
        raise error

    monkeypatch.setattr(jax, "devices", fail)
    expected = (
        r"^JAX cannot start on JAX_PLATFORMS=cpu \((no reason given|Unknown backend)\); set JAX_PLATFORMS=cpu, or"
    )
    with pytest.raises(ValueError, match=expected):
        startup.running()
