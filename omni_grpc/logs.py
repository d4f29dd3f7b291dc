"""The log's form: lines of text, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]
log = logging.getLogger("omni_grpc")

SECOND = "%Y-%m-%d %H:%M:%S"


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, what `extra={"fields": …}` brought,
    and the traceback of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """A line of text: time, level, message. Every call has one, so the time to the second is made
    once a second, not once a line."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self._second, self._time = -1, ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        """Local time to the millisecond, as logging's own is."""
        second = int(record.created)
        if second != self._second:
            self._second, self._time = second, time.strftime(SECOND, time.localtime(second))
        return f"{self._time},{int(record.msecs):03d}"

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        if record.exc_info or record.stack_info:
            return super().format(record)
        return f"{self.formatTime(record)} {record.levelname} {record.getMessage()}"


def announce(line: str) -> None:
    """Tells whoever started the server something: on standard output, or, where the log is for
    machines, in the log."""
    root = logging.getLogger()
    if any(isinstance(handler.formatter, JsonFormatter) for handler in root.handlers):
        log.info("%s", line)
    else:
        print(line, flush=True)


def set_up(form: LogFormat) -> None:
    """Sends the log to standard error in this form."""
    # In no line: neither who called, for which the stack is walked, nor what ran it.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.captureWarnings(form == "json")
