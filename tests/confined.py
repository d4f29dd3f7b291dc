"""A program as a pod would run it: a read-only root file system, a user that is only a number, no
rights; but reading, since a checkout may lie where others can't look."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

USER = 10001
RIGHT = "-all,+dac_read_search"
# In a mount namespace of its own. What may be written becomes a mount first: a mount's own flag
# stays when those around it turn read-only.
SCRIPT = """
set -eu
while [ "$1" != -- ]; do mount --bind "$1" "$1"; chown "$USER_ID:$USER_ID" "$1"; shift; done
shift
while read -r _ place _; do
  case " $WRITABLE /dev/shm " in *" $place "*) continue;; esac
  case $place in /proc|/proc/*|/dev/pts) continue;; esac
  mount -o remount,bind,ro "$place"
done < /proc/self/mounts
exec setpriv --reuid="$USER_ID" --regid="$USER_ID" --clear-groups --no-new-privs \\
  --inh-caps="$RIGHT" --ambient-caps="$RIGHT" --bounding-set="$RIGHT" -- "$@"
"""


def confined(
    command: Sequence[str | Path], writable: Sequence[Path], environment: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The command line and the variables that run `command`, with just those of `environment`,
    where only these folders and /dev/shm can be written. The process that is started is the
    program itself."""
    places = [str(place.resolve()) for place in writable]
    wrapped = ["unshare", "--mount", "--propagation", "private", "sh", "-c", SCRIPT, "sh"]
    variables = [f"{name}={value}" for name, value in environment.items()]
    inner = ["env", "-i", *variables, *map(str, command)]
    settings = {
        "PATH": os.environ["PATH"],
        "USER_ID": str(USER),
        "RIGHT": RIGHT,
        "WRITABLE": " ".join(places),
    }
    return [*wrapped, *places, "--", *inner], settings


@cache
def why_not() -> str:
    """Why nothing can be confined here; empty if it can."""
    if missing := [tool for tool in ("unshare", "setpriv") if shutil.which(tool) is None]:
        return f"{', '.join(missing)} of util-linux is missing"
    command, settings = confined(["true"], (), {})
    done = subprocess.run(command, env=settings, capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else ""
