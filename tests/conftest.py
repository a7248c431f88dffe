"""All tests run on 8 simulated CPU devices, compiled fast rather than well; test_gpu.py starts what it needs."""

import os
from pathlib import Path

# Before JAX starts. On jax 0.10 this compiles each fusion through LLVM alone, in less than half the time (a proof's
# programs: 4.9 s of CPU, and 2.1); later ones do not know the options and pass over them.
FLAGS = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true,xla_cpu_disable_tiled_emitter=true"
before = os.environ.get("XLA_FLAGS")
os.environ["XLA_FLAGS"] = f"{before or ''} {FLAGS}"

import jax
import pytest

from shared.runtime import startup

jax.config.update("jax_platforms", "cpu")  # the same everywhere, whatever else there is
startup.start(8, cpu_settings=False)
del os.environ["XLA_FLAGS"]  # for the commands that tests run, which start as users start them
if before is not None:
    os.environ["XLA_FLAGS"] = before
# Half the compile time; results move by 1e-7. Benchmarks never do this.
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture
def float64():
    """Allow 64-bit numbers in one test."""
    with jax.enable_x64(True):
        yield
