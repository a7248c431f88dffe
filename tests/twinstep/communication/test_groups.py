"""Groups of devices in each way in which XLA writes them, and names of operations."""

from typing import Any

import pytest
from jax.sharding import AbstractMesh

from twinstep.communication.entries import PRIMITIVES
from twinstep.communication.groups import axes_of, device_groups, linked, pairs, slice_groups
from twinstep.communication.hlo import arrays, message_class
from twinstep.communication.names import scope, written_by_name

MESH = AbstractMesh((2, 4), ("data", "tensor"))
Instruction = message_class("HloInstructionProto")
ROWS = [[0, 1, 2, 3], [4, 5, 6, 7]]
COLUMNS = [[0, 4], [1, 5], [2, 6], [3, 7]]


def mesh_axes(*axes: dict[str, Any], **mesh: Any) -> dict[str, Any]:
    """A list of groups along axes of a mesh of 2 x 4."""
    described = {"axes": [{"name": "data", "size": 2}, {"name": "tensor", "size": 4}], **mesh}
    return {"mesh_axes_replica_group_list": {"mesh": described, "axes": list(axes)}}


def iota(groups: int, size: int, dims: list[int], permutation: tuple[int, ...] = ()) -> dict[str, Any]:
    fields = {"iota_reshape_dims": dims, "iota_transpose_perm": permutation}
    return {
        "iota_collective_device_list": {"num_replica_groups": groups, "num_devices_per_group": size, **fields},
    }


def listed(groups: list[list[int]]) -> list[dict[str, Any]]:
    return [{"replica_ids": group} for group in groups]


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ({"replica_groups": listed(ROWS)}, ROWS),
        ({"collective_device_list": {"replica_groups": listed(COLUMNS)}}, COLUMNS),
        ({"collective_device_list": {}}, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (iota(2, 4, [8]), ROWS),
        (iota(4, 2, [2, 4], (1, 0)), COLUMNS),
        (mesh_axes({"mesh_axis_index": 1}), ROWS),
        (mesh_axes({"mesh_axis_index": 0}), COLUMNS),
        (mesh_axes({"mesh_axis_index": 0}, {"mesh_axis_index": 1}), [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (
            mesh_axes({"mesh_axis_index": 1, "sub_axis_info": {"pre_size": 1, "size": 2}}),
            [[0, 2], [1, 3], [4, 6], [5, 7]],
        ),
        (
            mesh_axes({"mesh_axis_index": 1, "sub_axis_info": {"pre_size": 2, "size": 2}}),
            [[0, 1], [2, 3], [4, 5], [6, 7]],
        ),
        (mesh_axes({"mesh_axis_index": 1}, device_ids=[0, 2, 4, 6, 1, 3, 5, 7]), [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (
            mesh_axes({"mesh_axis_index": 1}, iota_transform={"reshape_dims": [4, 2], "transpose_perm": [1, 0]}),
            [[0, 2, 4, 6], [1, 3, 5, 7]],
        ),
    ],
)
def test_every_way_to_write_groups(written: dict[str, Any], groups: list[list[int]]):
    found = device_groups(Instruction(name="all-reduce.1", **written), 8)
    assert sorted(map(sorted, found)) == groups


def test_groups_that_are_not_written_are_an_error():
    """As those in an encoding of a later XLA would seem to be."""
    with pytest.raises(ValueError, match=r"which devices take part in all-reduce\.1: its groups are written in a way"):
        device_groups(Instruction(name="all-reduce.1"), 8)
    with pytest.raises(ValueError, match=r"between which devices send\.1 sends"):
        pairs(Instruction(name="send.1"))
    with pytest.raises(ValueError, match="element type 99 is not known"):
        list(arrays(Instruction(shape={"element_type": 99}).shape))


def test_groups_across_slices():
    def send(target: str) -> Any:
        return Instruction(
            name="send.1", frontend_attributes={"map": [{"key": "_xla_megascale_target", "value": target}]}
        )

    assert slice_groups(send("{1,2}x{0:3}"), 8) == COLUMNS
    assert slice_groups(send("{1:4}x{0,1}"), 8) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    for target in ("{1,2}x{0:3}", ""):
        with pytest.raises(ValueError, match=r"between which of 16 devices send\.1 sends"):
            slice_groups(send(target), 16)


def test_pairs_and_axes():
    send = Instruction(
        frontend_attributes={"map": [{"key": "_xla_send_recv_source_target_pairs", "value": "{{0,1},{1,2}}"}]}
    )
    assert pairs(send) == [(0, 1), (1, 2)]
    assert linked([(0, 1), (2, 3), (1, 2), (5, 6)]) == [[0, 1, 2, 3], [5, 6]]
    assert axes_of(ROWS, MESH) == ("tensor",)
    assert axes_of(COLUMNS, MESH) == ("data",)
    assert axes_of([[*range(8)]], MESH) == ("data", "tensor")
    assert axes_of([[0, 1]], MESH) == ()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("jit(step)/jvp(blocks)/while/body/closed_call/attention/dot_general", "blocks.attention"),
        (
            "jit(step)/transpose(jvp(blocks))/eval_jaxpr/checkpoint/rematted_computation/attention/add",
            "blocks.attention",
        ),
        ("jit(step)/jvp(blocks)/attention/bhqk,bhsk->bhqs/dot_general", "blocks.attention"),
        ("jit(step)/shard_map/jvp(vmap(encoder))/jit(_where)/select_n", "encoder"),
        ("jit(step)/(reduce_sum:transpose(jvp(head))/reduce_sum:jvp(body.1)/mul)", "head+body.1"),
        ("jit(step)/while/body/cond/branch_1_fun/router/add", "router"),
        ("jit(step)/mul;jit(step)/norm/mul", "norm"),
        ("jit(step)/psum", ""),
        ("", ""),
    ],
)
def test_scopes(name: str, expected: str):
    assert scope(name) == expected


def test_what_is_written_by_name():
    assert written_by_name("jit(f)/shard_map/psum_invariant")
    assert written_by_name("jit(f)/(shard_map/psum:shard_map/psum)")
    assert not written_by_name("jit(f)/(shard_map/psum:dot_general)")
    assert not written_by_name("jit(f)/transpose(jvp(blocks))/reduce_sum")
    assert "psum" in PRIMITIVES
