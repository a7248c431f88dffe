"""What must be settled before JAX first touches a device: simulated devices, number types, CPU settings."""

import importlib.metadata
import importlib.util
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import jax

from shared.config import MOST_DEVICES, InputError, check, check_range
from shared.runtime import processes
from shared.runtime.keys import KEY_TYPE
from shared.runtime.processes import Cluster, join

SIMULATED_DEVICES = 4
"""Devices that a CPU simulates by default."""

# Flags that make the default step 3 to 5 % faster on CPU, with the processor feature they need and the versions of
# jaxlib they were tried on. An unknown flag would abort the program.
# Not here, though faster still on one device (0.8 of the time; no gain on four, a loss on eight):
# --xla_cpu_experimental_onednn_fusion_type. On jaxlib 0.10 it aborts in this model's backward pass ("partition compile
# failed"), and on 0.12 one run in sixteen aborted at its end, when programs are freed (object_pool.h).
CPU_SETTINGS = {"--xla_cpu_prefer_vector_width=512": ("avx512f", (0, 10), (0, 12))}


SETTLED = {
    "jax_default_prng_impl": KEY_TYPE,
    "jax_threefry_partitionable": True,  # else the numbers that a key draws depend on the sharding
    "jax_random_seed_offset": 0,
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
    "jax_use_shardy_partitioner": True,  # decides which collectives the auto twin gets
}
"""JAX's settings that `start` makes, whatever the environment says."""


@dataclass(frozen=True)
class Runtime:
    """The devices and settings in force, for reports."""

    platform: str
    devices: int
    cpu_settings: str
    """The XLA_FLAGS in force, and whether the user set them; empty on accelerators."""

    def describe(self) -> str:
        """Two lines for the head of a report."""
        kind = jax.devices()[0].device_kind
        simulated = f"simulated on {os.cpu_count()} cores, which they share" if self.platform == "cpu" else kind
        named = ", ".join(f"{name} {version}" for name, version in versions().items() if name != "orbax-checkpoint")
        settings = f"\nCPU settings: {self.cpu_settings}" if self.platform == "cpu" else ""
        where = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
        return f"{self.devices} {self.platform} devices{where} ({simulated}); {named}{settings}"


def versions() -> dict[str, str]:
    """Python and the packages that a result depends on."""
    packages = ("jax", "flax", "optax", "orbax-checkpoint")
    return {"Python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}


def start(simulated_devices: int, *, float64: bool = False, cpu_settings: bool = True) -> Runtime:
    """Settle the process and start JAX, before any array is made. A later call only describes what the first started.

    simulated_devices: how many devices the CPU simulates where there is no accelerator, unless the user has set
    JAX_NUM_CPU_DEVICES. float64: allow 64-bit numbers. cpu_settings: apply `CPU_SETTINGS` as far as the installed
    jaxlib and the processor accept them, unless the user has set XLA_FLAGS.
    """
    check_range("devices", simulated_devices, 1, MOST_DEVICES)
    if jax_has_started():
        return running()
    settings = " ".join(accepted_settings())
    if cpu_settings and settings and "XLA_FLAGS" not in os.environ and not accelerator_installed():
        os.environ["XLA_FLAGS"] = settings
    if jax.config.jax_num_cpu_devices < 0:
        jax.config.update("jax_num_cpu_devices", simulated_devices)
    settle(float64)
    return running()


def settle(float64: bool = False) -> None:
    """Set what in JAX's settings could make the twins, or two runs, differ, whatever environment variables say.

    Raises ValueError if JAX is set not to compile: the twins are compiled programs. Left to the user is what applies to
    both twins alike: `jax_default_matmul_precision`, and everything about debugging and logging.
    """
    check(not jax.config.jax_disable_jit, "JAX_DISABLE_JIT is set, but the twins are compiled programs; unset it")
    jax.config.update("jax_enable_x64", float64)
    for name, value in SETTLED.items():
        jax.config.update(name, value)


def jax_has_started() -> bool:
    """Whether JAX has started. It has no public query, but then refuses a different number of CPU devices."""
    devices = jax.config.jax_num_cpu_devices
    try:
        jax.config.update("jax_num_cpu_devices", devices + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", devices)
    return False


def running() -> Runtime:
    """Describe the JAX of this process, which starts if it has not. Raises ValueError if it cannot."""
    try:
        devices = jax.devices()
    except Exception as error:  # a plug-in that is not there is a RuntimeError or a bare AssertionError
        if processes.is_loss(error):
            raise
        reason = (str(error).splitlines() or ["no reason given"])[0]
        asked = jax.config.jax_platforms
        raise InputError(
            f"JAX cannot start{f' on JAX_PLATFORMS={asked}' if asked else ''} ({reason}); "
            "set JAX_PLATFORMS=cpu, or install what that platform needs"
        ) from None
    flags = os.environ.get("XLA_FLAGS", "")
    ours = flags == " ".join(accepted_settings())
    settings = "JAX's defaults" if not flags else flags if ours else f"{flags} (from XLA_FLAGS)"
    return Runtime(devices[0].platform, len(devices), settings if devices[0].platform == "cpu" else "")


def start_all(
    cluster: Cluster, devices: int | None, *, alone: int = SIMULATED_DEVICES, float64: bool = False
) -> tuple[Runtime, int]:
    """Join the other processes if there are any, start JAX, and return how many devices to use.

    devices: how many to use, over all processes. By default, a CPU simulates `alone` devices, or one in each of several
    processes, and all accelerators are used. Raises ValueError for a number that is not available.
    """
    check_range("devices", 1 if devices is None else devices, 1, MOST_DEVICES)
    processes = join(cluster)
    check(
        devices is None or devices % max(processes, 1) == 0,
        f"{devices} devices cannot be split evenly over {processes} processes; give a multiple of {processes}",
    )
    wanted = (alone if processes == 1 else 1) if devices is None else devices // max(processes, 1)
    found = start(wanted, float64=float64)
    devices = found.devices if devices is None else devices
    check(
        processes == 1 or devices == found.devices,
        f"{devices} devices requested, but the processes have {found.devices}, all of which must take part; "
        f"give --devices {found.devices}, or fewer processes",
    )
    return found, devices


def accelerator_installed() -> bool:
    """Whether JAX will look for accelerators; XLA_FLAGS are left alone then, as their plug-ins read them too."""
    if os.environ.get("JAX_PLATFORMS"):
        return os.environ["JAX_PLATFORMS"] != "cpu"
    return any(importlib.util.find_spec(name) for name in ("jax_plugins", "libtpu"))


def accepted_settings() -> list[str]:
    """The CPU settings that the installed jaxlib and this processor accept."""
    version = tuple(int(part) for part in importlib.metadata.version("jaxlib").split(".")[:2])
    return [
        flag
        for flag, (feature, first, last) in CPU_SETTINGS.items()
        if first <= version <= last and processor_has(feature)
    ]


def processor_has(feature: str) -> bool:
    """Whether Linux lists the feature for this processor; False where that cannot be known."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return False
    return any(feature in line.split() for line in lines if line.startswith("flags"))
