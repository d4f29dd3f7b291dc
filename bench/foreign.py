"""The few messages of other fronts' gRPC services that a load generator needs.

Only names, numbers and types of the fields that are sent or read; in proto2's manner, so that what
is set travels even where it is 0."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

Field = descriptor_pb2.FieldDescriptorProto
TYPES = {
    "string": Field.TYPE_STRING,
    "uint32": Field.TYPE_UINT32,
    "float": Field.TYPE_FLOAT,
    "bool": Field.TYPE_BOOL,
}


def messages(package: str, fields: dict[str, dict[str, tuple[int, str]]]) -> dict[str, Any]:
    """Classes of a package's messages by name. A field is its number and its type: a scalar's, or
    another message's name; `uint32*` is a repeated one."""
    file = descriptor_pb2.FileDescriptorProto(
        name=f"bench/{package}.proto", package=package, syntax="proto2"
    )
    for name, members in fields.items():
        message = file.message_type.add(name=name)
        for member, (number, kind) in members.items():
            base = kind.removesuffix("*")
            field = message.field.add(
                name=member,
                number=number,
                label=Field.LABEL_REPEATED if kind != base else Field.LABEL_OPTIONAL,
            )
            if base in TYPES:
                field.type = TYPES[base]
                field.options.packed = kind != base
            else:
                field.type, field.type_name = Field.TYPE_MESSAGE, f".{package}.{base}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))
        for name in fields
    }


SERVICER = messages(
    "vllm.grpc.engine",
    {
        "SamplingParams": {
            "temperature": (1, "float"),
            "top_p": (2, "float"),
            "repetition_penalty": (7, "float"),
            "max_tokens": (8, "uint32"),
            "ignore_eos": (14, "bool"),
            "n": (15, "uint32"),
        },
        "GenerateRequest": {
            "request_id": (1, "string"),
            "text": (3, "string"),
            "sampling_params": (4, "SamplingParams"),
            "stream": (5, "bool"),
        },
        "Chunk": {"token_ids": (1, "uint32*")},
        "GenerateResponse": {"chunk": (1, "Chunk")},
    },
)
"""Of vLLM's Python gRPC server."""
SERVICER_METHOD = "/vllm.grpc.engine.VllmEngine/Generate"

RUST = messages(
    "vllm",
    {
        "StoppingCriteria": {"max_new_tokens": (1, "uint32"), "ignore_eos": (6, "bool")},
        "ResponseOptions": {"output_text": (4, "bool"), "output_token_ids": (5, "bool")},
        "GenerateRequest": {
            "request_id": (1, "string"),
            "text": (3, "string"),
            "temperature": (5, "float"),
            "stopping": (8, "StoppingCriteria"),
            "response": (9, "ResponseOptions"),
        },
        "Sequence": {
            "text": (2, "string"),
            "num_tokens": (3, "uint32"),
            "token_ids": (4, "uint32*"),
        },
        "GenerateResponse": {"outputs": (2, "Sequence")},
    },
)
"""Of vLLM's Rust front."""
RUST_METHOD = "/vllm.Inference/GenerateStream"
