"""All tests run on 8 simulated CPU devices, compiled fast rather than well; test_gpu.py starts what it needs."""

import os
from pathlib import Path

import jax
import pytest

from shared.runtime import startup

jax.config.update("jax_platforms", "cpu")  # the same everywhere, whatever else there is
# On jax 0.10 each fusion is compiled through LLVM alone, in less than half the time (a proof's program: 2.1 s of CPU
# instead of 4.9); later ones do not know these options and pass over them. Commands that tests run start without.
FAST = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true,xla_cpu_disable_tiled_emitter=true"
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {FAST}")
    startup.start(8, cpu_settings=False)
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
