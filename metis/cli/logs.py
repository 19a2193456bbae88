"""Structured logs on stderr: one event a line, as text or as JSON.

Code logs a constant message and its figures: `log.info("serving",
extra={"address": path})`. The format decides how the two are put on the line.
"""

from __future__ import annotations

import json
import logging
import sys
import time

LEVELS = (logging.INFO, logging.DEBUG)
"""Level by number of -v; more than the last changes nothing."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """What the caller passed in `extra`."""
    return {k: v for k, v in vars(record).items() if k not in _STANDARD}


def _timestamp(record: logging.LogRecord) -> str:
    """RFC 3339 in UTC with milliseconds."""
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


class TextFormatter(logging.Formatter):
    """`TIME LEVEL LOGGER MESSAGE key=value ...`, a traceback below it."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and a traceback where there is one."""
        words = [
            _timestamp(record),
            record.levelname,
            record.name,
            record.getMessage(),
            *(f"{key}={_quoted(value)}" for key, value in _fields(record).items()),
        ]
        line = " ".join(words)
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, then the figures."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, a traceback as the text "exception"."""
        event: dict[str, object] = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event, default=str)


def set_up_logging(log_format: str, verbosity: int) -> None:
    """Send every log record of this process to stderr.

    Args:
      log_format: "text" or "json".
      verbosity: how often -v was given; see LEVELS.
    """
    # A log that cannot be written (a closed pipe, a full disk) must not become
    # an error of the daemon.
    logging.raiseExceptions = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    # Ours alone: at DEBUG, hpack writes a line for every header field.
    level = LEVELS[min(verbosity, len(LEVELS) - 1)]
    logging.getLogger("metis").setLevel(level)


def _quoted(value: object) -> str:
    text = str(value)
    if text and text.isprintable() and not any(c in text for c in ' "='):
        return text
    return json.dumps(text)
