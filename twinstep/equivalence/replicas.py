"""Copies of one array on several devices that are not the same bits."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from twinstep.equivalence.leaves import is_key, plain


def differing_replicas(leaves: Mapping[str, Any]) -> list[str]:
    """One line for each leaf whose copies on different devices differ, the largest difference first.

    It names the mesh axes along which they differ.

    JAX takes it on trust that an array declared replicated is, and numpy shows the first device's copy only; so a
    step that forgets a reduction can look right. All copies that this process holds are compared.
    """
    found: list[tuple[float, str]] = []
    for name, leaf in leaves.items():
        if not isinstance(leaf, jax.Array):
            continue
        copies: dict[str, list[tuple[jax.Device, np.ndarray]]] = {}
        for shard in leaf.addressable_shards:
            copies.setdefault(str(shard.index), []).append((shard.device, plain(shard.data)))
        for (first, data), *others in copies.values():
            other = next((device for device, copy in others if copy.tobytes() != data.tobytes()), None)
            if other is None:
                continue
            difference = float(np.max(np.abs(dict(others)[other].astype(np.float64) - data.astype(np.float64))))
            by = "" if is_key(leaf) else f" by up to {difference:.2e}"
            line = (
                f"{name}: the copies on {first} and {other} differ{by}, though the array is declared replicated: "
                f"a reduction{over(leaf, dict([(first, data), *others]))} is missing, or something differs from "
                "device to device that should not"
            )
            found.append((-difference, line))
            break
    return [line for _, line in sorted(found)]


def over(leaf: jax.Array, copies: Mapping[jax.Device, np.ndarray]) -> str:
    """` over data`: the mesh axes along which the copies differ, and along which they do not; empty if unknown."""
    if not isinstance(leaf.sharding, NamedSharding):
        return ""
    mesh = leaf.sharding.mesh
    places = {device: place for place, device in np.ndenumerate(mesh.devices) if device in copies}
    differing, agreeing = [], []
    for axis, name in enumerate(mesh.axis_names):
        lines: dict[tuple[int, ...], set[bytes]] = {}
        for device, place in places.items():
            lines.setdefault((*place[:axis], *place[axis + 1 :]), set()).add(copies[device].tobytes())
        if mesh.devices.shape[axis] > 1:
            (differing if max(map(len, lines.values())) > 1 else agreeing).append(name)
    agree = f" (along {', '.join(agreeing)} they agree)" if agreeing else ""
    return f" over {', '.join(differing)}{agree}" if differing else ""
