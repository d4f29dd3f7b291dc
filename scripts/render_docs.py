"""Writes what documents have from the code: docs/contract.md, and the tables between markers.

    <!-- keys StageConfig -->  …  <!-- end -->     a table of the keys of that configuration
    <!-- errors -->            …  <!-- end -->     a table of all errors

usage: scripts/render_docs.py [--check]    with --check nothing is written: drift is an error"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from omni_grpc import config, errors, ledger
from scripts.render_contract import contract

DOCS = Path("docs")
MARKED = re.compile(r"(<!-- (\w+)(?: (\w+))? -->\n).*?(<!-- end -->)", re.DOTALL)

MEANINGS = {
    "PipelineConfig.name": "What requests call it.",
    "PipelineConfig.description": "For people; `omni-grpc describe` shows it.",
    "PipelineConfig.stages": "The stages; see below.",
    "StageConfig.name": "What requests and other stages call it.",
    "StageConfig.engine": "What runs it; [models.md](models.md) has each.",
    "StageConfig.replicas": "Processes that run it.",
    "StageConfig.restart": "How a replica that died comes back; see below.",
    "RestartPolicy.backoff": "Wait before the first new start.",
    "RestartPolicy.max_backoff": "The wait doubles up to this.",
    "RestartPolicy.budget": "Starts within `window`; when they are used up, the place stays empty.",
    "RestartPolicy.window": "See `budget`.",
    "MediaPolicy.max_items": "Media of one request.",
    "MediaPolicy.max_frames": "Of one film.",
    "MediaPolicy.max_audio_s": "Length of one sound.",
    "MediaPolicy.fetch_timeout": "Longest time to read one URI.",
    "MediaPolicy.max_redirects": "Of one URI.",
    "ServerConfig.host": "Address to listen on.",
    "ServerConfig.port": "0 picks a free one.",
    "ServerConfig.max_receive_bytes": "Largest message from a client.",
    "ServerConfig.media": "See below.",
    "ServerConfig.tls": "[security.md](security.md) has it.",
    "ServerConfig.auth": "[security.md](security.md) has it.",
    "ServerConfig.connections": "[security.md](security.md) has an example.",
}
"""Of keys whose code needs no words."""


def rendered() -> dict[Path, str]:
    """All documents with parts that come from the code, as they should be."""
    pages = {DOCS / "contract.md": contract()}
    for path in sorted(DOCS.glob("*.md")):
        if path not in pages and MARKED.search(text := path.read_text()):
            pages[path] = MARKED.sub(_part, text)
    return pages


def _part(match: re.Match[str]) -> str:
    what, name = match[2], match[3]
    table = keys_table(getattr(config, name)) if what == "keys" else errors_table()
    return f"{match[1]}{table}{match[4]}"


def keys_table(model: type[BaseModel]) -> str:
    """The keys of a configuration: type, default, meaning."""
    schema = model.model_json_schema()
    docstrings = attribute_docstrings(model)
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        kind = _kind(schema["properties"][name], schema.get("$defs", {}))
        default = "required" if field.is_required() else _default(field.default)
        meaning = docstrings.get(name) or MEANINGS.get(f"{model.__name__}.{name}")
        if meaning is None:
            raise SystemExit(f"{model.__name__}.{name}: no docstring, and nothing in MEANINGS")
        lines.append(f"| `{name}` | {kind} | {default} | {meaning.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def attribute_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The strings that stand below a class's attributes, each on one line."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for attribute, after in zip(body.body, body.body[1:], strict=False):
        match attribute, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split())
    return found


def _kind(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """A JSON schema in words."""
    match schema:
        case {"$ref": str(reference)}:
            return _kind(definitions[reference.rpartition("/")[2]], definitions)
        case {"anyOf": [first, *_]}:
            return _kind(first, definitions)
        case {"enum": list(values)}:
            return ", ".join(f"`{value}`" for value in values)
        case {"type": "array", "items": inner}:
            return f"list of {_items(inner, definitions)}"
        case {"type": "object"}:
            return "mapping"
        case {"type": "string", "pattern": str(pattern)} if pattern.startswith("^[a-z0-9]"):
            return "name"
        case {"type": "boolean"}:
            return "true, false"
        case {"type": str(kind)}:
            bounds = _bounds(schema)
            return f"{kind} {bounds}".strip()
    return "any"


def _items(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    kind = _kind(schema, definitions)
    return {"mapping": "mappings", "name": "names", "string": "strings"}.get(kind, kind)


def _bounds(schema: Mapping[str, Any]) -> str:
    least = f"from {schema['minimum']:g}" if "minimum" in schema else ""
    if "exclusiveMinimum" in schema:
        least = f"above {schema['exclusiveMinimum']:g}"
    most = f"to {_number(schema['maximum'])}" if "maximum" in schema else ""
    return f"{least} {most}".strip()


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def _default(value: object) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case int() if value >= 1 << 20 and value % (1 << 20) == 0:
            return f"{value >> 20} MiB"
        case float():
            return f"{value:g}"
        case BaseModel():
            return "its own"
        case "" | () | {}:
            return "empty"
        case tuple():
            return f"`[{', '.join(map(str, value))}]`".replace("Modality.TEXT", "text")
    return f"`{value}`"


def all_errors() -> dict[str, type[errors.OmniError]]:
    """The service's errors by reason: those of errors.py, and the ledger's."""
    assert ledger.EventIdConflict.reason in errors.OmniError.by_reason
    known = errors.OmniError.by_reason.items()
    return {reason: error for reason, error in known if error.__module__.startswith("omni_grpc.")}


def errors_table() -> str:
    """All errors of the service, by status code as errors.py draws them."""
    lines = ["| reason | status | what happened |", "|---|---|---|"]
    for reason, error in all_errors().items():
        text = " ".join((error.__doc__ or "").split())
        lines.append(f"| `{reason}` | {error.code.name} | {text} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    drift = []
    for path, text in rendered().items():
        if not path.exists() or path.read_text() != text:
            drift.append(str(path))
            if "--check" not in sys.argv:
                path.write_text(text)
    if drift and "--check" in sys.argv:
        print(f"not what the code says: {', '.join(drift)}; run 'make docs'", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
