"""Documents as tests read them: each is one script, done from top to bottom in a folder of its own.

What stands behind a block's language says what is done with it:

    ```sh                      run
    ```python                  run by itself
    ```yaml file=shout.yaml    written into the folder; so is any other language with `file=`
    ```sh models               run where a test asks for blocks with that word
    ```go from=clients/x.go    a part of that file, which tests run; `// ...` is a gap
    ```text printed            what the document's commands print, among other things
    ```sh no-run: the reason   left out: it cannot run where tests run

`omni-grpc serve` goes on in the background until the next one, or the end. Wherever the document
calls localhost:50051, the script calls the port that it was given."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.running import BIN
from tests.support import ENVIRONMENT, ROOT

TARGET = "localhost:50051"
LINKED = (".venv", "clients", "docs", "k8s", "omni_grpc", "protos", "scripts", "README.md")
"""What a reader has in the repository's root, where the commands are to be typed."""

FENCE = re.compile(r"^```(\w+)(?: +(\S[^\n]*))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRELUDE = """set -euo pipefail
trap 'echo "failed: $BASH_COMMAND" >&2' ERR
SERVER=
stop_server() { if [ -n "$SERVER" ]; then kill "$SERVER"; wait "$SERVER" || true; SERVER=; fi; }
trap stop_server EXIT
omni-grpc() {
  local PYTHONPATH="${PYTHONPATH:-}:$OWN_PATH" TRIED=0
  export PYTHONPATH
  case "$1" in
    serve)
      stop_server
      command omni-grpc "$@" --port "$PORT" >server.log 2>&1 &
      SERVER=$!
      until grep -q '^Serving ' server.log; do
        TRIED=$((TRIED + 1))
        kill -0 "$SERVER" 2>/dev/null && [ $TRIED -lt 9000 ] || { cat server.log >&2; return 1; }
        sleep 0.02
      done ;;
    generate | describe | speak | live)
      case " $* " in
        *" --target "*) command omni-grpc "$@" ;;
        *) command omni-grpc "$@" --target "localhost:$PORT" ;;
      esac ;;
    *) command omni-grpc "$@" ;;
  esac
}
"""


@dataclass(frozen=True, slots=True)
class Block:
    """A code block: where it stands (its fence's line, from 1), its language, what stands behind
    that, and its text."""

    document: str
    line: int
    language: str
    options: str
    text: str

    @property
    def left_out(self) -> str | None:
        """Why it is not run; None: it is."""
        found = re.match(r"no-run: (.+)", self.options)
        return found[1] if found else None

    @property
    def origin(self) -> str | None:
        """The file that it is a part of; None: of none."""
        found = re.fullmatch(r"from=(\S+)", self.options)
        return found[1] if found else None

    @property
    def file(self) -> str | None:
        """The file that it is; None: it is none."""
        found = re.fullmatch(r"file=(\S+)", self.options)
        return found[1] if found else None

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def documents() -> list[Path]:
    """All documents of the repository that git knows, or would."""
    listed = subprocess.run(
        ("git", "ls-files", "-co", "--exclude-standard", "*.md"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def blocks(document: Path, language: str | None = None) -> list[Block]:
    """The document's code blocks, in order; of one language, if one is named."""
    text = document.read_text()
    found = [
        Block(
            str(document.relative_to(ROOT)),
            text.count("\n", 0, match.start()) + 1,
            match[1],
            match[2] or "",
            match[3],
        )
        for match in FENCE.finditer(text)
    ]
    return [block for block in found if language in (None, block.language)]


def script_of(blocks: list[Block], port: int, word: str = "") -> str:
    """What the blocks with that word say, as one shell script for a server at that port."""
    parts = [PRELUDE]
    for block in blocks:
        text = block.text.replace(TARGET, f"localhost:{port}")
        end = f"END-OF-LINE-{block.line}"
        if block.file is not None:
            parts.append(f"cat >{shlex.quote(block.file)} <<'{end}'\n{text}{end}\n")
        elif block.options != word:
            continue
        elif block.language == "sh":
            parts.append(text)
        elif block.language == "python":
            parts.append(f"{shlex.quote(sys.executable)} - <<'{end}'\n{text}{end}\n")
    return "".join(parts)


def perform(
    blocks: list[Block],
    folder: Path,
    port: int,
    *,
    word: str = "",
    timeout: float = 80,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Does what the blocks with that word say, in the folder; what they print. AssertionError if
    one fails.

    Where they start no server of their own, there must be one at the port."""
    for name in LINKED:
        if (ROOT / name).exists() and not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    process = subprocess.Popen(
        ("bash", "-s"),
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Of its own, so that all that it started can be ended.
        start_new_session=True,
        env={
            **os.environ,
            **ENVIRONMENT,
            "PYTHON": sys.executable,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "OWN_PATH": f"{ROOT}:{ROOT / 'clients/python'}",
            "PORT": str(port),
            **(environment or {}),
        },
    )
    try:
        printed, complaints = process.communicate(script_of(blocks, port, word), timeout)
    finally:
        end_session(process)
    assert process.returncode == 0, f"{printed}\n{complaints}"
    return printed


def end_session(process: subprocess.Popen[str]) -> None:
    """Ends what is left of what it started, replicas of a server too: those go with their
    server."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def table(document: Path, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, without its head; cells as written."""
    text = document.read_text()
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"{document.name} has no heading {heading!r}"
    lines = [line for line in found[1].splitlines() if line.startswith("|")]
    assert len(lines) > 2, f"{document.name}: no table below {heading!r}"
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def is_part_of(text: str, whole: str) -> bool:
    """Whether the text's lines stand in the whole, in order and without gap but where `// ...`
    says so; indentation does not count."""
    lines = [line.strip() for line in whole.splitlines()]
    at = 0
    for part in re.split(r"^// \.\.\.\n", text, flags=re.MULTILINE):
        wanted = [line.strip() for line in part.splitlines()]
        while lines[at : at + len(wanted)] != wanted:
            at += 1
            if at >= len(lines):
                return False
    return True
