"""Compiled programs as XLA describes them, on every backend: serialized `HloModuleProto`s.

The descriptor below has those fields of `xla/service/hlo.proto` and `xla/xla_data.proto` that are read here, with their
numbers; protobuf skips all others. (JAX's exporter to StableHLO, the other way in, refuses programs of TPUs and GPUs.)
"""

import math
from collections.abc import Iterator
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

TEXT, BYTES, INT, BOOL = "TYPE_STRING", "TYPE_BYTES", "TYPE_INT64", "TYPE_BOOL"
INT32, UINT32, UINT64 = "TYPE_INT32", "TYPE_UINT32", "TYPE_UINT64"
MANY = True
"""Marks a repeated field."""

MESSAGES: dict[str, dict[str, tuple[Any, ...]]] = {
    "ShapeProto": {"element_type": (2, INT32), "dimensions": (3, INT, MANY), "tuple_shapes": (4, "ShapeProto", MANY)},
    "OpMetadata": {
        "op_name": (2, TEXT),
        "source_file": (3, TEXT),
        "source_line": (4, INT32),
        "stack_frame_id": (15, INT32),
    },
    "LiteralProto": {
        "preds": (2, BOOL, MANY),
        "u8s": (3, BYTES),
        "s32s": (4, INT32, MANY),
        "s64s": (5, INT, MANY),
        "u32s": (6, UINT32, MANY),
        "u64s": (7, UINT64, MANY),
        "s8s": (15, BYTES),
        "u16s": (16, BYTES),
        "s16s": (17, BYTES),
    },
    "ReplicaGroup": {"replica_ids": (1, INT, MANY)},
    "CollectiveDeviceListProto": {"replica_groups": (1, "ReplicaGroup", MANY)},
    "IotaReplicaGroupListProto": {
        "num_replica_groups": (1, INT),
        "num_devices_per_group": (2, INT),
        "iota_reshape_dims": (3, INT, MANY),
        "iota_transpose_perm": (4, INT32, MANY),
    },
    "MeshAxis": {"name": (1, TEXT), "size": (2, INT)},
    "IotaTransform": {"reshape_dims": (1, INT, MANY), "transpose_perm": (2, INT, MANY)},
    "MeshProto": {
        "axes": (1, "MeshAxis", MANY),
        "device_ids": (2, INT, MANY),
        "iota_transform": (3, "IotaTransform"),
    },
    "SubAxis": {"pre_size": (1, INT), "size": (2, INT)},
    "AxisRefProto": {"mesh_axis_index": (1, INT), "sub_axis_info": (2, "SubAxis")},
    "MeshAxesReplicaGroupListProto": {"mesh": (1, "MeshProto"), "axes": (2, "AxisRefProto", MANY)},
    "SourceTarget": {"source": (1, INT), "target": (2, INT)},
    "Attribute": {"key": (1, TEXT), "value": (2, TEXT)},
    "FrontendAttributes": {"map": (1, "Attribute", MANY)},
    "HloInstructionProto": {
        "name": (1, TEXT),
        "opcode": (2, TEXT),
        "shape": (3, "ShapeProto"),
        "metadata": (7, "OpMetadata"),
        "literal": (8, "LiteralProto"),
        "parameter_number": (9, INT),
        "tuple_index": (13, INT),
        "custom_call_target": (28, TEXT),
        "id": (35, INT),
        "operand_ids": (36, INT, MANY),
        "called_computation_ids": (38, INT, MANY),
        "backend_config": (43, BYTES),
        "is_host_transfer": (47, BOOL),
        "replica_groups": (49, "ReplicaGroup", MANY),
        "source_target_pairs": (52, "SourceTarget", MANY),
        "comparison_direction": (63, TEXT),
        "frontend_attributes": (68, "FrontendAttributes"),
        "collective_device_list": (87, "CollectiveDeviceListProto"),
        "iota_collective_device_list": (92, "IotaReplicaGroupListProto"),
        "mesh_axes_replica_group_list": (93, "MeshAxesReplicaGroupListProto"),
    },
    "HloComputationProto": {
        "name": (1, TEXT),
        "instructions": (2, "HloInstructionProto", MANY),
        "id": (5, INT),
        "root_id": (6, INT),
    },
    "InstructionSequence": {"instruction_ids": (1, INT, MANY)},
    "Sequence": {"key": (1, INT), "value": (2, "InstructionSequence")},
    "HloScheduleProto": {"sequences": (1, "Sequence", MANY)},
    "FileLocation": {"file_name_id": (1, INT32), "line": (3, INT32)},
    "StackFrame": {"file_location_id": (1, INT32), "parent_frame_id": (2, INT32)},
    "StackFrameIndexProto": {
        "file_names": (1, TEXT, MANY),
        "file_locations": (3, "FileLocation", MANY),
        "stack_frames": (4, "StackFrame", MANY),
    },
    "HloModuleProto": {
        "name": (1, TEXT),
        "computations": (3, "HloComputationProto", MANY),
        "entry_computation_id": (6, INT),
        "schedule": (7, "HloScheduleProto"),
        "stack_frame_index": (17, "StackFrameIndexProto"),
    },
}


def message_class(name: str) -> Any:
    """The class of a message of MESSAGES."""
    descriptors: Any = descriptor_pb2  # their classes are made when they are imported
    pools: Any = descriptor_pool
    file = descriptors.FileDescriptorProto(name="twinstep_hlo.proto", package="twinstep_hlo", syntax="proto3")
    fields = descriptors.FieldDescriptorProto
    for message, described in MESSAGES.items():
        entry = file.message_type.add(name=message)
        for field, (number, kind, *many) in described.items():
            label = fields.LABEL_REPEATED if many else fields.LABEL_OPTIONAL
            added = entry.field.add(name=field, number=number, label=label)
            if kind in MESSAGES:
                added.type, added.type_name = fields.TYPE_MESSAGE, f".twinstep_hlo.{kind}"
            else:
                added.type = getattr(fields, kind)
    pool = pools.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"twinstep_hlo.{name}"))


HloModule = message_class("HloModuleProto")

TUPLE, TOKEN = 13, 17
TYPES = {
    1: ("bool", 8), 2: ("int8", 8), 3: ("int16", 16), 4: ("int32", 32), 5: ("int64", 64), 6: ("uint8", 8),
    7: ("uint16", 16), 8: ("uint32", 32), 9: ("uint64", 64), 10: ("float16", 16), 11: ("float32", 32),
    12: ("float64", 64), 15: ("complex64", 64), 16: ("bfloat16", 16), 18: ("complex128", 128),
    19: ("float8_e5m2", 8), 20: ("float8_e4m3fn", 8), 21: ("int4", 4), 22: ("uint4", 4),
    23: ("float8_e4m3b11fnuz", 8), 24: ("float8_e5m2fnuz", 8), 25: ("float8_e4m3fnuz", 8), 26: ("int2", 2),
    27: ("uint2", 2), 28: ("float8_e4m3", 8), 29: ("float8_e3m4", 8), 32: ("float4_e2m1fn", 4),
    33: ("float8_e8m0fnu", 8), 35: ("float6_e3m2fn", 6), 36: ("float6_e2m3fn", 6),
}  # fmt: skip
"""XLA's `PrimitiveType` to JAX's name of the type, and bits."""


def arrays(shape: Any) -> Iterator[tuple[str, int]]:
    """Type and bytes of each array in a shape, which may be a tuple. Raises ValueError for a type not known."""
    if shape.element_type == TUPLE:
        for part in shape.tuple_shapes:
            yield from arrays(part)
    elif shape.element_type != TOKEN:
        if shape.element_type not in TYPES:
            raise ValueError(f"cannot read a compiled program: XLA's element type {shape.element_type} is not known")
        name, bits = TYPES[shape.element_type]
        yield name, -(-math.prod(shape.dimensions) * bits // 8)


class Program:
    """A module, with its computations and instructions by their numbers."""

    def __init__(self, serialized: bytes):
        self.module = HloModule.FromString(serialized)
        self.computations = {c.id: c for c in self.module.computations}
        self.instructions = {i.id: i for c in self.module.computations for i in c.instructions}
        self.order = {s.key: list(s.value.instruction_ids) for s in self.module.schedule.sequences}
        if self.module.entry_computation_id not in self.computations:
            raise ValueError("cannot read a compiled program: it names no computation to begin with")

    def in_order(self, computation: int) -> list[Any]:
        """A computation's instructions as scheduled, or as they stand where there is no schedule."""
        if computation in self.order:
            return [self.instructions[number] for number in self.order[computation]]
        return list(self.computations[computation].instructions)

    def root(self, computation: int) -> Any:
        return self.instructions[self.computations[computation].root_id]

    def operands(self, instruction: Any) -> list[Any]:
        return [self.instructions[number] for number in instruction.operand_ids]


def attributes(instruction: Any) -> dict[str, str]:
    """What the frontend noted about an instruction."""
    return {entry.key: entry.value for entry in instruction.frontend_attributes.map}
