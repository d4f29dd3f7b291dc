"""Refuses functions that don't fit on a screen."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

LIMIT = 60
ROOTS = ("omni_grpc", "clients/python", "tests", "scripts", "bench")
GENERATED = Path("omni_grpc/v1")


def long_functions(path: Path) -> Iterator[str]:
    """Yields one line for every function of the file that is longer than the limit."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > LIMIT:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines (limit {LIMIT})"


def main() -> int:
    paths = sorted(path for root in ROOTS for path in Path(root).rglob("*.py"))
    found = [
        line for path in paths if GENERATED not in path.parents for line in long_functions(path)
    ]
    print("\n".join(found), file=sys.stderr, end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
