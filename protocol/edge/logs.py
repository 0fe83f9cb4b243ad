"""How the server logs: structlog for our own events, and other libraries' loggers through the same pipe.

Event names are snake_case, everything else is a field. The context variables `connection` and `response`,
bound where one begins, are on every line below. One line a request and a socket, none a token. Nothing here
ever sees a key: heads are not logged, and tracebacks are printed without the values of variables.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog
from structlog.typing import Processor

from protocol.settings import LogFormat, LogLevel


def set_up_logging(log_format: LogFormat, log_level: LogLevel, stream: TextIO | None = None) -> None:
    """Send all logging of this process to `stream` (standard error if None). Called once, at start."""
    stream = stream or sys.stderr
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    final: list[Processor]
    if log_format == "json":
        final = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        renderer = structlog.dev.ConsoleRenderer(
            colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
        final = [renderer]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final],
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    level = logging.getLevelNamesMapping()[log_level.upper()]
    root.setLevel(level)
    logging.getLogger("trio-websocket").setLevel(logging.WARNING)  # a line a frame at debug
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
