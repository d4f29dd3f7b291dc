"""The contract as a page: every service, message, enum and field with its comment in the protos."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    ServiceDescriptorProto,
)

PROTOS = Path("protos")
PACKAGE = "omni_grpc.v1"
ORDER = ("service", "prompt", "params", "output", "info", "common", "admin")
"""From the door inwards; a file that is not named here comes last."""
HEAD = """# The contract

Package `omni_grpc.v1`, from the comments in [protos/omni_grpc/v1](../protos/omni_grpc/v1).
`make docs` writes this page.

A field that is *optional* knows unset from 0, false and "". Of the fields of one *oneof* at most
one is set. Field numbers are in the protos. What a call that fails says is in
[errors.md](errors.md).
"""

# Numbers of fields in descriptor.proto, of which paths in a file's source information are made.
MESSAGES, ENUMS, SERVICES = 4, 5, 6
FIELDS, NESTED, MESSAGE_ENUMS, VALUES, METHODS = 2, 3, 4, 2, 2

SCALARS = {
    number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items()
}


class Comments:
    """The comments of one file, by path."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._by_path = {
            tuple(place.path): place.leading_comments for place in file.source_code_info.location
        }

    def at(self, *path: int) -> str:
        """The comment there, its paragraphs kept, lines within them joined."""
        text = re.sub(r"^ ", "", self._by_path.get(path, ""), flags=re.MULTILINE).strip()
        return re.sub(r"(?<!\n)\n(?!\n)", " ", text)

    def cell(self, *path: int) -> str:
        """The comment as a table's cell."""
        return self.at(*path).replace("\n\n", "<br>").replace("|", "\\|")


def compiled() -> list[FileDescriptorProto]:
    """The contract's files, with comments, in ORDER."""
    sources = sorted(PROTOS.glob("omni_grpc/v1/*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        command = (sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}")
        options = (f"--descriptor_set_out={out}", "--include_source_info")
        subprocess.run((*command, *options, *map(str, sources)), check=True)
        files = FileDescriptorSet.FromString(out.read_bytes()).file
    places = {name: place for place, name in enumerate(ORDER)}
    return sorted(files, key=lambda file: places.get(Path(file.name).stem, len(ORDER)))


def contract() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(line for file in compiled() for line in _file(file))]).rstrip() + "\n"


def _file(file: FileDescriptorProto) -> Iterator[str]:
    comments = Comments(file)
    yield f"## {Path(file.name).name}\n"
    for place, service in enumerate(file.service):
        yield from _service(service, comments, (SERVICES, place))
    for place, message in enumerate(file.message_type):
        yield from _message(message, comments, (MESSAGES, place))
    for place, enum in enumerate(file.enum_type):
        yield from _enum(enum, comments, (ENUMS, place))


def _service(
    service: ServiceDescriptorProto, comments: Comments, path: tuple[int, ...]
) -> Iterator[str]:
    yield from _title(f"Service {service.name}", comments.at(*path))
    rows = [
        (f"`{m.name}`", _signature(m), comments.cell(*path, METHODS, place))
        for place, m in enumerate(service.method)
    ]
    yield from _table(("rpc", "takes → gives", "meaning"), rows)


def _signature(method: MethodDescriptorProto) -> str:
    takes, gives = _link(method.input_type), _link(method.output_type)
    stream = "stream of "
    return f"{stream * method.client_streaming}{takes} → {stream * method.server_streaming}{gives}"


def _message(
    message: DescriptorProto, comments: Comments, path: tuple[int, ...], outer: str = ""
) -> Iterator[str]:
    if message.options.map_entry:
        return
    name = f"{outer}{message.name}"
    yield from _title(name, comments.at(*path))
    rows = [
        (f"`{field.name}`", _type(field, message), comments.cell(*path, FIELDS, place))
        for place, field in enumerate(message.field)
    ]
    yield from _table(("field", "type", "meaning"), rows)
    for place, nested in enumerate(message.nested_type):
        yield from _message(nested, comments, (*path, NESTED, place), f"{name}.")
    for place, enum in enumerate(message.enum_type):
        yield from _enum(enum, comments, (*path, MESSAGE_ENUMS, place), f"{name}.")


def _type(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    entry = next((n for n in message.nested_type if field.type_name.endswith(f".{n.name}")), None)
    if entry is not None and entry.options.map_entry:
        key, value = (_kind(inner) for inner in entry.field)
        return f"map of {key} to {value}"
    text = _kind(field)
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {text}"
    if field.proto3_optional:
        return f"optional {text}"
    if field.HasField("oneof_index"):
        return f"{text}, oneof `{message.oneof_decl[field.oneof_index].name}`"
    return text


def _kind(field: FieldDescriptorProto) -> str:
    return _link(field.type_name) if field.type_name else SCALARS[field.type]


def _link(type_name: str) -> str:
    name = type_name.removeprefix(f".{PACKAGE}.")
    if name == type_name:
        return f"`{name.lstrip('.')}`"
    return f"[{name}](#{name.lower().replace('.', '')})"


def _enum(
    enum: EnumDescriptorProto, comments: Comments, path: tuple[int, ...], outer: str = ""
) -> Iterator[str]:
    yield from _title(f"{outer}{enum.name}", comments.at(*path))
    rows = [
        (f"`{value.name}`", str(value.number), comments.cell(*path, VALUES, place))
        for place, value in enumerate(enum.value)
    ]
    yield from _table(("value", "number", "meaning"), rows)


def _title(name: str, comment: str) -> Iterator[str]:
    yield f"### {name}\n"
    if comment:
        yield f"{comment}\n"


def _table(head: Sequence[str], rows: list[tuple[str, str, str]]) -> Iterator[str]:
    if rows:
        lines = [head, tuple("---" for _ in head), *rows]
        yield "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
