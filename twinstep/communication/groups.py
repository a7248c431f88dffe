"""Which devices take part in a collective: XLA's ways of writing their groups, and the mesh axes these lie along."""

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from twinstep.communication.hlo import attributes

AnyMesh = Mesh | AbstractMesh
Groups = list[list[int]]


def device_groups(instruction: Any, devices: int) -> Groups:
    """Groups of device positions of an instruction other than a permutation. Raises ValueError if none are written.

    XLA writes them in one of three ways: as lists, as a reshaped and transposed count (iota), or as axes of a mesh. A
    list that is written but empty means all devices (xla/service/collective_ops_utils.h).
    """
    if instruction.HasField("mesh_axes_replica_group_list"):
        return mesh_axes_groups(instruction.mesh_axes_replica_group_list)
    if instruction.HasField("iota_collective_device_list"):
        iota = instruction.iota_collective_device_list
        ids = transposed(iota.iota_reshape_dims, iota.iota_transpose_perm)
        return ids.reshape(iota.num_replica_groups, iota.num_devices_per_group).tolist()
    if instruction.HasField("collective_device_list"):
        listed = instruction.collective_device_list.replica_groups
        return [list(group.replica_ids) for group in listed] or [list(range(devices))]
    if instruction.replica_groups:
        return [list(group.replica_ids) for group in instruction.replica_groups]
    raise ValueError(
        f"cannot read which devices take part in {instruction.name}: its groups are written in a way that is not known"
    )


def transposed(dims: Sequence[int], permutation: Sequence[int]) -> np.ndarray:
    """The whole numbers from 0 in this shape, transposed."""
    if not dims:
        raise ValueError("cannot read which devices take part: a list of groups has no sizes")
    ids = np.arange(math.prod(dims)).reshape(tuple(dims))
    return ids.transpose(tuple(permutation)) if permutation else ids


def mesh_axes_groups(listed: Any) -> Groups:
    """Groups along axes of a mesh, or parts of axes, that the instruction itself describes.

    An axis of size s has a part (before, size): the middle one of sizes before x size x rest
    (xla/hlo/ir/replica_group.cc).
    """
    sizes = [axis.size for axis in listed.mesh.axes]
    if listed.mesh.device_ids:
        ids = np.array(listed.mesh.device_ids)
    elif listed.mesh.HasField("iota_transform"):
        ids = transposed(listed.mesh.iota_transform.reshape_dims, listed.mesh.iota_transform.transpose_perm)
    else:
        ids = np.arange(math.prod(sizes))
    cuts: list[set[int]] = [{1, size} for size in sizes]
    wanted = []
    for axis in listed.axes:
        index = axis.mesh_axis_index
        before, size = (
            (axis.sub_axis_info.pre_size, axis.sub_axis_info.size)
            if axis.HasField("sub_axis_info")
            else (1, sizes[index])
        )
        cuts[index] |= {before, before * size}
        wanted.append((index, before, before * size))
    pieces = [(i, a, b) for i, cut in enumerate(cuts) for a, b in itertools.pairwise(sorted(cut))]
    along = [p for axis, first, last in wanted for p in range(len(pieces)) if inside(pieces[p], axis, first, last)]
    shaped = ids.reshape([b // a for _, a, b in pieces])
    members = math.prod(shaped.shape[p] for p in along)
    return np.moveaxis(shaped, along, range(-len(along), 0)).reshape(-1, members).tolist()


def inside(piece: tuple[int, int, int], axis: int, first: int, last: int) -> bool:
    return piece[0] == axis and first <= piece[1] and piece[2] <= last


def slice_groups(instruction: Any, devices: int) -> Groups:
    """Groups of device positions of a transfer between TPU slices, which name one device of each slice.

    XLA writes slices and devices of a slice as `{1,2}x{0:3}`. Raises ValueError where they are not all that there are.
    """
    target = attributes(instruction).get("_xla_megascale_target", "")
    slices, _, members = (span(part) for part in target.partition("x"))
    if not slices or len(slices) * len(members) != devices or sorted(members) != list(range(len(members))):
        raise ValueError(f"cannot read between which of {devices} devices {instruction.name} sends: {target!r}")
    return [[number * len(members) + member for number in range(len(slices))] for member in members]


def span(text: str) -> list[int]:
    """The numbers in `{0,3,5:7}`, where a colon stands for a range with its end."""
    ends = [[int(end) for end in part.split(":")] for part in text.strip("{}").split(",") if part.strip("{}x")]
    return [number for first, *last in ends for number in range(first, (last[0] if last else first) + 1)]


def pairs(instruction: Any) -> list[tuple[int, int]]:
    """Source and target of each message of a permutation or a send. Raises ValueError if none are written."""
    if instruction.source_target_pairs:
        return [(pair.source, pair.target) for pair in instruction.source_target_pairs]
    written = attributes(instruction).get("_xla_send_recv_source_target_pairs")
    if written:
        return [(a, b) for a, b in json.loads(written.replace("{", "[").replace("}", "]"))]
    raise ValueError(f"cannot read between which devices {instruction.name} sends: it has no pairs of devices")


def linked(messages: Iterable[tuple[int, int]]) -> Groups:
    """Groups of devices that messages connect."""
    groups: list[set[int]] = []
    for message in messages:
        touched = [group for group in groups if group & set(message)]
        groups = [group for group in groups if group not in touched] + [set(message).union(*touched)]
    return [sorted(group) for group in groups]


def axes_of(groups: Groups, mesh: AnyMesh) -> tuple[str, ...]:
    """The fewest mesh axes along which these groups of device positions lie; empty if they are not those of any."""
    names, sizes = tuple(mesh.shape), tuple(mesh.shape.values())
    positions = np.arange(math.prod(sizes)).reshape(sizes)
    wanted = {frozenset(group) for group in groups}
    for number in range(1, len(names) + 1):
        for chosen in itertools.combinations(range(len(names)), number):
            size = math.prod(sizes[axis] for axis in chosen)
            rows = np.moveaxis(positions, chosen, range(-number, 0)).reshape(-1, size)
            if wanted <= {frozenset(row.tolist()) for row in rows}:
                return tuple(names[axis] for axis in chosen)
    return ()
