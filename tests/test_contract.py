"""The contract's files: clean, generated, explained field by field, and with the names that others
rely on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FileDescriptor

from omni_grpc.v1 import (
    admin_pb2,
    common_pb2,
    info_pb2,
    output_pb2,
    params_pb2,
    prompt_pb2,
    service_pb2,
)
from tests.running import BIN
from tests.support import ROOT

FILES: list[FileDescriptor] = [
    module.DESCRIPTOR
    for module in (
        admin_pb2,
        common_pb2,
        info_pb2,
        output_pb2,
        params_pb2,
        prompt_pb2,
        service_pb2,
    )
]

# The names of the contract's page: renaming one breaks clients, checks and gateways.
ADMIN = "PauseStage ResumeStage ResetCache SleepStage WakeStage LoadLora UnloadLora Drain GetCensus"
METHODS = {
    "OmniService": {
        "AddRequest": (False, True),
        "StreamingUpdate": (True, False),
        "SubmitInteraction": (True, True),
        "Abort": (False, False),
        "GetServerInfo": (False, False),
        "GetLoad": (False, False),
        "WatchLoad": (False, True),
    },
    "AdminService": dict.fromkeys(ADMIN.split(), (False, False)),
}

FIELDS = {
    "AddRequestRequest": "request_id pipeline prompt stage_params output_modalities resumable lora "
    "priority data_parallel_rank arrival_time reasoning_ended tokenization cache_salt "
    "additional_information",
    "Prompt": "text token_ids messages embeds media negative_text",
    "Media": "modality data uri tensor mime_type uuid",
    "StageParams": "stage sampling diffusion codec custom",
    "Tensor": "data dtype shape",
    "AddRequestResponse": "seq epoch accepted output segment_end progress finished",
    "Accepted": "request_id pipeline stages outputs",
    "Output": "stage index segment text audio image video tensor",
    "TextDelta": "text token_ids logprobs",
    "AudioChunk": "data start_sample format",
    "AudioFormat": "encoding sample_rate_hz channels",
    "ImageChunk": "data mime_type width height offset last",
    "VideoChunk": "data mime_type chunk_index first_frame frame_count last active_event_ids",
    "Progress": "stage step total_steps preview",
    "Finished": "finish_reasons usage timings",
    "StageFinish": "stage index reason stop_text stop_token_id",
    "Usage": "prompt_tokens cached_tokens completion_tokens audio_samples frames steps",
    "Timings": "preprocess_ms transform_ms queue_wait_ms stage_ms first_output_ms",
    "StreamingUpdateRequest": "header chunk",
    "UpdateHeader": "request_id",
    "UpdateChunk": "seq text prompt audio stage_params end_of_segment",
    "StreamingUpdateResponse": "accepted_chunks duplicate_chunks segments",
    "SubmitInteractionRequest": "setup update end_input event interrupt abort",
    "InteractionSetup": "open attach",
    "Attach": "request_id receive_outputs",
    "InteractionEvent": "event_id prompt negative_prompt media parameters transition_chunks",
    "Interrupt": "played_ms",
    "SubmitInteractionResponse": "setup_complete event_state update_rejected response interrupted "
    "going_away",
    "EventState": "event_id state chunk resubmission",
    "UpdateRejected": "seq status",
    "Interrupted": "epoch",
    "AbortRequest": "request_ids",
    "AbortResponse": "results",
    "AbortResponse.Result": "request_id outcome",
    "ReplicaLoad": "replica waiting running work_left kv_cache_use capacity sample_age_ms",
}

OPTIONAL = (
    "lora priority data_parallel_rank arrival_time reasoning_ended tokenization cache_salt "
    "additional_information"
)

VALUES = {
    "Modality": "MODALITY_UNSPECIFIED MODALITY_TEXT MODALITY_AUDIO MODALITY_IMAGE MODALITY_VIDEO "
    "MODALITY_TENSOR",
    "EventState.State": "STATE_QUEUED STATE_REJECTED STATE_SUPERSEDED STATE_EXPIRED STATE_STARTED "
    "STATE_COMPLETED",
    "AbortResponse.Outcome": "OUTCOME_ABORTED OUTCOME_ALREADY_FINISHED OUTCOME_NOT_FOUND",
}

PARAMETERS = ("SamplingParams", "DiffusionParams", "CodecParams")


def messages_of(file: FileDescriptor) -> Iterator[Descriptor]:
    """All messages of a file, nested ones too, without the entries of maps."""
    waiting = list(file.message_types_by_name.values())
    while waiting:
        message = waiting.pop()
        if not message.GetOptions().map_entry:
            yield message
            waiting += message.nested_types


MESSAGES = {
    message.full_name.removeprefix("omni_grpc.v1."): message
    for file in FILES
    for message in messages_of(file)
}


def enums() -> dict[str, EnumDescriptor]:
    """All enums, nested ones too."""
    own = [enum for file in FILES for enum in file.enum_types_by_name.values()]
    own += [enum for message in MESSAGES.values() for enum in message.enum_types]
    return {enum.full_name.removeprefix("omni_grpc.v1."): enum for enum in own}


def run(*command: str | Path) -> None:
    """Runs a tool in the repository; it must succeed and print nothing."""
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=25, env=environment
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---------------------------------------------------------------- files


def test_all_files_of_the_contract_are_looked_at() -> None:
    paths = {str(path.relative_to(ROOT / "protos")) for path in (ROOT / "protos").rglob("*.proto")}
    assert {file.name for file in FILES} == paths


def test_contract_passes_the_linter() -> None:
    run(BIN / "buf", "lint")


def test_contract_is_formatted() -> None:
    run(BIN / "buf", "format", "--diff", "--exit-code")


def test_stubs_are_what_the_contract_generates() -> None:
    run(ROOT / "scripts" / "check_stubs")


@pytest.mark.parametrize("file", FILES, ids=lambda file: Path(file.name).stem)
def test_each_language_has_a_package(file: FileDescriptor) -> None:
    options = file.GetOptions()
    assert file.package == "omni_grpc.v1"
    for language in ("java_package", "go_package", "csharp_namespace"):
        assert getattr(options, language)
    assert options.java_multiple_files


# ---------------------------------------------------------------- comments


def described(
    places: Iterable[tuple[str, list[int]]], comments: dict[tuple[int, ...], str]
) -> Iterator[str]:
    """The names whose place has no comment."""
    return (name for name, place in places if not comments.get(tuple(place), "").strip())


def places_of_enum(
    enum: descriptor_pb2.EnumDescriptorProto, path: list[int]
) -> Iterator[tuple[str, list[int]]]:
    """The enum and its values, with their places in the file's descriptor."""
    yield enum.name, path
    for number, value in enumerate(enum.value):
        yield f"{enum.name}.{value.name}", [*path, 2, number]


def places_of_message(
    message: descriptor_pb2.DescriptorProto, path: list[int]
) -> Iterator[tuple[str, list[int]]]:
    """The message, its fields, its oneofs, and what is nested in it."""
    yield message.name, path
    for number, field in enumerate(message.field):
        yield f"{message.name}.{field.name}", [*path, 2, number]
    for number, oneof in enumerate(message.oneof_decl):
        if not oneof.name.startswith("_"):  # those stand for `optional`
            yield f"{message.name}.{oneof.name}", [*path, 8, number]
    for number, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            yield from places_of_message(nested, [*path, 3, number])
    for number, enum in enumerate(message.enum_type):
        yield from places_of_enum(enum, [*path, 4, number])


def places_of_file(file: descriptor_pb2.FileDescriptorProto) -> Iterator[tuple[str, list[int]]]:
    """All that a file declares."""
    for number, message in enumerate(file.message_type):
        yield from places_of_message(message, [4, number])
    for number, enum in enumerate(file.enum_type):
        yield from places_of_enum(enum, [5, number])
    for number, service in enumerate(file.service):
        yield service.name, [6, number]
        for place, method in enumerate(service.method):
            yield f"{service.name}.{method.name}", [6, number, 2, place]


def test_everything_in_the_contract_is_explained(tmp_path: Path) -> None:
    image = tmp_path / "contract.binpb"
    run(BIN / "buf", "build", "--as-file-descriptor-set", "--exclude-imports", "-o", image)
    files = descriptor_pb2.FileDescriptorSet.FromString(image.read_bytes()).file
    assert len(files) == len(FILES)
    silent: list[str] = []
    count = 0
    for file in files:
        comments = {tuple(x.path): x.leading_comments for x in file.source_code_info.location}
        places = list(places_of_file(file))
        count += len(places)
        silent += described(places, comments)
    assert silent == []
    assert count > 300


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("service", METHODS)
def test_service_has_its_methods_in_their_shape(service: str) -> None:
    file = service_pb2.DESCRIPTOR if service == "OmniService" else admin_pb2.DESCRIPTOR
    methods = file.services_by_name[service].methods
    shapes = {m.name: (m.client_streaming, m.server_streaming) for m in methods}
    assert METHODS[service].items() <= shapes.items()


def test_no_message_is_shared_by_two_rpcs() -> None:
    used = [
        message.full_name
        for file in FILES
        for service in file.services_by_name.values()
        for method in service.methods
        for message in (method.input_type, method.output_type)
    ]
    assert len(used) == len(set(used))


@pytest.mark.parametrize("message", FIELDS)
def test_message_has_its_fields(message: str) -> None:
    assert set(FIELDS[message].split()) <= set(MESSAGES[message].fields_by_name)


@pytest.mark.parametrize("enum", VALUES)
def test_enum_has_its_values(enum: str) -> None:
    assert set(VALUES[enum].split()) <= set(enums()[enum].values_by_name)


def test_options_of_a_request_can_be_left_unset() -> None:
    fields = MESSAGES["AddRequestRequest"].fields_by_name
    assert all(fields[name].has_presence for name in OPTIONAL.split())


@pytest.mark.parametrize("message", PARAMETERS)
def test_every_scalar_parameter_is_optional(message: str) -> None:
    fields = MESSAGES[message].fields
    assert all(field.has_presence or field.is_repeated for field in fields)


def test_seed_is_64_bits_wide() -> None:
    seed = params_pb2.SamplingParams(seed=2**64 - 1)
    assert params_pb2.SamplingParams.FromString(seed.SerializeToString()).seed == 2**64 - 1


def test_tensors_are_bytes() -> None:
    fields = MESSAGES["Tensor"].fields_by_name
    assert fields["data"].type == descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
    floats = descriptor_pb2.FieldDescriptorProto.TYPE_FLOAT
    repeated = [
        field.full_name
        for message in MESSAGES.values()
        for field in message.fields
        if field.is_repeated and field.type == floats
    ]
    assert repeated == []


def test_maps_have_string_keys() -> None:
    keys = [
        field.message_type.fields_by_name["key"].type
        for message in MESSAGES.values()
        for field in message.fields
        if field.message_type is not None and field.message_type.GetOptions().map_entry
    ]
    assert keys and set(keys) == {descriptor_pb2.FieldDescriptorProto.TYPE_STRING}
