"""Read XLA's HloProto: the program, its buffer assignment and its heap traces, as the compiler dumps them.

`_SCHEMA` has only the fields that Lowtide needs. protobuf skips all others, so a newer XLA may add fields. The numbers
of fields are those of `xla/service/hlo.proto` and `xla/xla_data.proto` in openxla/xla, checked against jaxlib 0.10.2
and libtpu 0.0.51.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from ..core import StructureError

_INT, _TEXT, _BOOL, _BYTES = "int", "text", "bool", "bytes"

# message -> field -> (number, type). A list is a repeated field; a type other than the four above is a message.
_SCHEMA: dict[str, dict[str, tuple[int, str | list[str]]]] = {
    "Hlo": {"module": (1, "Module"), "assignment": (3, "Assignment")},
    "Module": {
        "computations": (3, ["Computation"]),
        "entry_computation_id": (6, _INT),
        "schedule": (7, "Schedule"),
        "input_output_alias": (8, "InputOutputAlias"),
        "stack_frame_index": (17, "StackFrameIndex"),
    },
    "InputOutputAlias": {"entries": (1, ["AliasEntry"])},
    "AliasEntry": {
        "output_shape_index": (1, [_INT]),
        "parameter_number": (2, _INT),
        "parameter_shape_index": (3, [_INT]),
    },
    "StackFrameIndex": {
        "file_names": (1, [_TEXT]),
        "function_names": (2, [_TEXT]),
        "file_locations": (3, ["FileLocation"]),
        "stack_frames": (4, ["StackFrame"]),
    },
    "FileLocation": {"file_name_id": (1, _INT), "function_name_id": (2, _INT), "line": (3, _INT)},
    "StackFrame": {"file_location_id": (1, _INT), "parent_frame_id": (2, _INT)},
    "Computation": {"name": (1, _TEXT), "instructions": (2, ["Instruction"]), "id": (5, _INT), "root_id": (6, _INT)},
    "Instruction": {
        "name": (1, _TEXT),
        "opcode": (2, _TEXT),
        "shape": (3, "Shape"),
        "metadata": (7, "Metadata"),
        "literal": (8, "Literal"),
        "parameter_number": (9, _INT),
        "tuple_index": (13, _INT),
        "custom_call_target": (28, _TEXT),
        "id": (35, _INT),
        "operand_ids": (36, [_INT]),
        "called_computation_ids": (38, [_INT]),
        "backend_config": (43, _BYTES),
        "comparison_direction": (63, _TEXT),
    },
    "Literal": {"s32s": (4, [_INT]), "s64s": (5, [_INT]), "u32s": (6, [_INT])},
    "Metadata": {"op_name": (2, _TEXT), "stack_frame_id": (15, _INT)},
    "Shape": {
        "element_type": (2, _INT),
        "dimensions": (3, [_INT]),
        "tuple_shapes": (4, ["Shape"]),
        "layout": (5, "Layout"),
    },
    "Layout": {"memory_space": (8, _INT)},
    "Schedule": {"sequences": (1, ["ScheduleEntry"])},
    "ScheduleEntry": {"key": (1, _INT), "value": (2, "Sequence")},
    "Sequence": {"instruction_ids": (1, [_INT])},
    "Assignment": {
        "logical_buffers": (1, ["LogicalBuffer"]),
        "allocations": (3, ["Allocation"]),
        "heap_traces": (4, ["HeapTrace"]),
        "peak_buffers": (5, ["PeakBuffers"]),
    },
    "PeakBuffers": {"allocation": (1, _INT), "logical_buffer_ids": (2, [_INT])},
    "LogicalBuffer": {"id": (1, _INT), "size": (2, _INT), "defined_at": (3, "Location")},
    "Location": {"instruction_id": (4, _INT), "shape_index": (3, [_INT])},
    "Allocation": {
        "index": (1, _INT),
        "size": (2, _INT),
        "is_thread_local": (3, _BOOL),
        "is_entry_parameter": (5, _BOOL),
        "parameter_number": (6, _INT),
        "parameter_shape_index": (10, [_INT]),
        "maybe_live_out": (7, _BOOL),
        "color": (8, _INT),
        "assigned": (9, ["Assigned"]),
        "is_constant": (12, _BOOL),
        "is_parameter_aliased_with_output": (13, _BOOL),
    },
    "Assigned": {"logical_buffer_id": (1, _INT), "offset": (2, _INT), "size": (3, _INT)},
    "HeapTrace": {"events": (1, ["HeapEvent"])},
    "HeapEvent": {
        "kind": (1, _INT),
        "buffer_id": (2, _INT),
        "instruction_name": (4, _TEXT),
        "share_with_canonical_id": (5, _INT),
    },
}

# xla_data.proto's PrimitiveType: number -> (name, bits of an element).
_ELEMENT_TYPES = {
    1: ("pred", 8),
    2: ("s8", 8),
    3: ("s16", 16),
    4: ("s32", 32),
    5: ("s64", 64),
    6: ("u8", 8),
    7: ("u16", 16),
    8: ("u32", 32),
    9: ("u64", 64),
    10: ("f16", 16),
    11: ("f32", 32),
    12: ("f64", 64),
    15: ("c64", 64),
    16: ("bf16", 16),
    18: ("c128", 128),
    19: ("f8e5m2", 8),
    20: ("f8e4m3fn", 8),
    21: ("s4", 4),
    22: ("u4", 4),
    23: ("f8e4m3b11fnuz", 8),
    24: ("f8e5m2fnuz", 8),
    25: ("f8e4m3fnuz", 8),
    26: ("s2", 2),
    27: ("u2", 2),
    28: ("f8e4m3", 8),
    29: ("f8e3m4", 8),
    32: ("f4e2m1fn", 4),
    33: ("f8e8m0fnu", 8),
}


def read_hlo(path: str | Path) -> Any:
    """Parse a dumped ``*.hlo.pb`` as the ``Hlo`` of `_SCHEMA`; `StructureError` when the file is not an HloProto."""
    from google.protobuf.message import DecodeError

    try:
        return _message_class().FromString(Path(path).read_bytes())
    except DecodeError as error:
        hint = "report this with the versions of jax and XLA"
        raise StructureError(f"{path}: the file is not a program dumped by XLA: {error}", hint=hint) from error


def element_type(number: int) -> tuple[str, int]:
    """Return name and bits per element of a `PrimitiveType`; empty and 0 for tuples, tokens and unknown types."""
    return _ELEMENT_TYPES.get(number, ("", 0))


@functools.cache
def _message_class() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    package = "lowtide.hlo"
    file = descriptor_pb2.FileDescriptorProto(name="lowtide_hlo.proto", package=package, syntax="proto3")
    field_type = descriptor_pb2.FieldDescriptorProto
    scalars = {
        _INT: field_type.TYPE_INT64,
        _TEXT: field_type.TYPE_STRING,
        _BOOL: field_type.TYPE_BOOL,
        _BYTES: field_type.TYPE_BYTES,
    }
    for name, fields in _SCHEMA.items():
        message: Any = file.message_type.add(name=name)
        for field_name, (number, kind) in fields.items():
            item = kind[0] if isinstance(kind, list) else kind
            field = message.field.add(name=field_name, number=number)
            field.label = field_type.LABEL_REPEATED if isinstance(kind, list) else field_type.LABEL_OPTIONAL
            field.type = scalars.get(item, field_type.TYPE_MESSAGE)
            if item not in scalars:
                field.type_name = f".{package}.{item}"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.Hlo"))
