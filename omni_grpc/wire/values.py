"""What several messages share: presence, enums, Structs."""

from __future__ import annotations

import math
from typing import Any

from google.protobuf.message import Message as ProtoMessage
from google.protobuf.struct_pb2 import Struct, Value

from omni_grpc.errors import InvalidField
from omni_grpc.types import AudioEncoding, DataType, FinishReason, Modality
from omni_grpc.v1 import common_pb2, output_pb2

MAX_STRUCT_DEPTH = 32

MODALITY: dict[int, Modality] = {
    common_pb2.MODALITY_TEXT: Modality.TEXT,
    common_pb2.MODALITY_AUDIO: Modality.AUDIO,
    common_pb2.MODALITY_IMAGE: Modality.IMAGE,
    common_pb2.MODALITY_VIDEO: Modality.VIDEO,
    common_pb2.MODALITY_TENSOR: Modality.TENSOR,
}
MODALITY_OUT: dict[Modality, Any] = {kind: number for number, kind in MODALITY.items()}
DATA_TYPE: dict[int, DataType] = {
    getattr(common_pb2, f"DATA_TYPE_{kind.name}"): kind for kind in DataType
}
DATA_TYPE_OUT: dict[DataType, Any] = {kind: number for number, kind in DATA_TYPE.items()}
ENCODING_OUT = {
    AudioEncoding.PCM_S16LE: common_pb2.AUDIO_ENCODING_PCM_S16LE,
    AudioEncoding.PCM_F32LE: common_pb2.AUDIO_ENCODING_PCM_F32LE,
}
REASON_OUT = {
    reason: getattr(output_pb2, f"FINISH_REASON_{reason.name}") for reason in FinishReason
}


def decode_modality(value: int, path: str) -> Modality:
    """The modality of that number. Raises InvalidField."""
    if value not in MODALITY:
        raise InvalidField(path, "is not a known modality")
    return MODALITY[value]


def optional(message: ProtoMessage, name: str) -> Any:
    """The field's value, None where it is not set."""
    return getattr(message, name) if message.HasField(name) else None


def decode_struct(message: Struct, path: str) -> dict[str, Any]:
    """A Struct as Python values. All numbers are floats. Raises InvalidField for numbers that are
    not finite and for nesting beyond MAX_STRUCT_DEPTH."""
    return {k: _value(v, f"{path}.{k}", 1) for k, v in message.fields.items()}


def _value(value: Value, path: str, depth: int) -> Any:
    if depth > MAX_STRUCT_DEPTH:
        raise InvalidField(path, f"is nested deeper than {MAX_STRUCT_DEPTH}")
    match value.WhichOneof("kind"):
        case "number_value":
            if not math.isfinite(value.number_value):
                raise InvalidField(path, "is not a finite number")
            return value.number_value
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "struct_value":
            fields = value.struct_value.fields
            return {k: _value(v, f"{path}.{k}", depth + 1) for k, v in fields.items()}
        case "list_value":
            values = value.list_value.values
            return [_value(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(values)]
    return None
