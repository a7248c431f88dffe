"""What must be settled before JAX first touches a device: simulated devices, number types, CPU settings.

Everything that depends on the version of JAX is here or in `twinstep/communication/compiled.py`.
"""

import importlib.metadata
import importlib.util
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import jax

from shared.config import check
from shared.runtime.processes import Cluster, join

SIMULATED_DEVICES = 4
"""Devices that a CPU pretends to be unless the user says how many."""

# What makes the default step faster on CPU (3 to 5 %), with the feature of the processor that it needs and the versions
# of jaxlib that were tried. An unknown flag would abort the program.
# Not here, though faster still on one device (0.8 of the time; no gain on four, a loss on eight):
# --xla_cpu_experimental_onednn_fusion_type. On jaxlib 0.10 it aborts in this model's backward pass ("partition compile
# failed"), and on 0.12 one run in sixteen aborted at its end, when programs are freed (object_pool.h).
CPU_SETTINGS = {"--xla_cpu_prefer_vector_width=512": ("avx512f", (0, 10), (0, 12))}


@dataclass(frozen=True)
class Runtime:
    """What `start` found and set, for reports."""

    platform: str
    devices: int
    cpu_settings: str
    """The XLA_FLAGS in force, and whose they are; empty on accelerators."""

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


STARTED: list[Runtime] = []
"""What this process was started with; JAX can be settled only once."""


def start(simulated_devices: int, *, float64: bool = False, cpu_settings: bool = True) -> Runtime:
    """Settle the process and start JAX, before any array is made. A second call only returns what the first found.

    simulated_devices: how many devices the CPU pretends to be where there is no accelerator, unless the user has
    set JAX_NUM_CPU_DEVICES. float64: allow 64-bit numbers. cpu_settings: apply `CPU_SETTINGS` as far as the installed
    jaxlib and the processor take them, unless the user has set XLA_FLAGS.
    """
    check(simulated_devices >= 1, f"devices is {simulated_devices}; give at least 1")
    if STARTED:
        return STARTED[0]
    users = os.environ.get("XLA_FLAGS")
    ours = "" if users is not None or not cpu_settings or accelerator_installed() else " ".join(accepted_settings())
    if ours:
        os.environ["XLA_FLAGS"] = ours
    if jax.config.jax_num_cpu_devices < 0:
        jax.config.update("jax_num_cpu_devices", simulated_devices)
    if float64:
        jax.config.update("jax_enable_x64", True)
    devices = jax.devices()
    whose = f"{users} (from XLA_FLAGS)" if users else ours or "JAX's defaults"
    STARTED.append(Runtime(devices[0].platform, len(devices), whose if devices[0].platform == "cpu" else ""))
    return STARTED[0]


def start_all(
    cluster: Cluster, devices: int | None, *, alone: int = SIMULATED_DEVICES, float64: bool = False
) -> tuple[Runtime, int]:
    """Join the other processes if there are any, start JAX, and return how many devices to use.

    devices: how many are asked for, over all processes. By default, a CPU pretends to be `alone` devices, or one in
    each of several processes, and of accelerators all are used. Raises ValueError for what cannot be.
    """
    check(devices is None or devices >= 1, f"devices is {devices}; give at least 1")
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
        f"{devices} devices asked for, but the processes have {found.devices}, and all of them must take part; "
        f"give --devices {found.devices}, or fewer processes",
    )
    return found, devices


def accelerator_installed() -> bool:
    """Whether JAX will look for anything but CPUs: then its flags are left alone, as plug-ins read them too."""
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
