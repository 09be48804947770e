"""Log lines without secrets: JSON on a pipe, a console on a terminal."""

import logging
import math
import os
import re
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import TextIO

import structlog
from structlog.typing import EventDict, Processor

from autoscaler.errors import AutoscalerError

HIDDEN = "***"

_SENSITIVE = (
    r"(?<![\w\-])(?:[\w\-]*(?:authorization|cookie|password|passwd|secret|api[_\-]?key|credential)s?"
    r"|(?:[\w\-]*[_\-])?token)"
)
_SENSITIVE_NAME = re.compile(_SENSITIVE, re.IGNORECASE)
# A sensitive name, a separator as in headers, keyword arguments, YAML, JSON or a pair in a list, then the value: quoted
# (to the end of the line when its closing quote was cut off), or one word after an optional scheme.
_NAMED = re.compile(
    rf"(?P<head>{_SENSITIVE}(?:\\?[\"']?[ \t]*[:=][ \t]*|\\?[\"'],[ \t]*))"
    r"(?:b?(?P<quote>\\?[\"']).*?(?:(?P=quote)|$)"
    r"|(?:(?:bearer|basic|digest|negotiate|token|apikey)[ \t]+)?[^\s,;&\"'}\])]+)",
    re.IGNORECASE | re.MULTILINE,
)
# Cookies and digests hold several values, so these headers are hidden to the end of the line.
_HEADER = re.compile(r"\b((?:set-)?cookie:|authorization:[ \t]*digest\b)[^\r\n\"']+", re.IGNORECASE)
_USERINFO = re.compile(r"(?<![A-Za-z0-9+.\-])([A-Za-z][A-Za-z0-9+.\-]*://)[^\s\"'<>]{0,1024}@")
_BEARER = re.compile(r"\b(bearer)[ \t]+(?!(?:token|auth\w*)(?:[\s.,;:)\"']|$))[^\s\"',;)\]}]+", re.IGNORECASE)
_BASIC = re.compile(r"\b([Bb]asic)[ \t]+(?=[a-z+/]*[A-Z0-9])[A-Za-z0-9+/]{4,}={0,2}")
_JWT = re.compile(r"\beyJ[A-Za-z0-9_\-]{4,}\.[A-Za-z0-9_\-]+\.?[A-Za-z0-9_\-]*")


def redact(text: str) -> str:
    """Return the text without credentials: `user:pass@` in URLs, bearer and basic tokens, values of sensitive names."""
    text = _USERINFO.sub(rf"\1{HIDDEN}@", text)
    text = _HEADER.sub(rf"\1 {HIDDEN}", text)
    text = _NAMED.sub(rf"\g<head>{HIDDEN}", text)
    text = _BEARER.sub(rf"\1 {HIDDEN}", text)
    text = _BASIC.sub(rf"\1 {HIDDEN}", text)
    return _JWT.sub(HIDDEN, text)


def _is_sensitive(name: object) -> bool:
    text = name.decode("latin-1") if isinstance(name, bytes) else name
    return isinstance(text, str) and _SENSITIVE_NAME.fullmatch(text) is not None


def _scrub(value: object) -> object:
    """Return the value as plain JSON data without credentials; what has no JSON form becomes its redacted repr."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return redact(str(value))
    if isinstance(value, Mapping):
        return {redact(str(key)): HIDDEN if _is_sensitive(key) else _scrub(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = list(value)
        if len(items) == 2 and _is_sensitive(items[0]):
            return [_scrub(items[0]), HIDDEN]
        return [_scrub(inner) for inner in items]
    return redact(repr(value))


def _scrub_event(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Return the event without credentials, the fields that every line has first."""
    head = {key: event.pop(key) for key in ("timestamp", "level", "event") if key in event}
    return {
        key: HIDDEN if _is_sensitive(key) and value is not None else _scrub(value)
        for key, value in (head | dict(event)).items()
    }


class _OurHandler(logging.StreamHandler[TextIO]):
    """The handler for libraries' records; a class of its own, so that a second set-up replaces it."""


def configure_logging(level: str = "info", *, json: bool | None = None, stream: TextIO | None = None) -> None:
    """Set up logging for the process: ours, libraries' and the last words of a crash.

    Libraries are heard from `warning` up, from `debug` when that is the level. Nothing passes unredacted.

    Args:
        json: one JSON object a line, or a coloured console; None takes JSON unless the stream is a terminal.
        stream: where lines go; None is standard output.
    Raises: AutoscalerError, for an unknown level.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise AutoscalerError(f"log level {level!r}: must be debug, info, warning, error or critical")
    out = sys.stdout if stream is None else stream
    terminal = out.isatty()
    as_json = not terminal if json is None else json
    stamp = structlog.processors.TimeStamper(fmt="iso" if as_json else "%H:%M:%S", utc=as_json)
    render: list[Processor] = [structlog.processors.format_exc_info, _scrub_event]
    if as_json:
        render.append(structlog.processors.JSONRenderer())
    else:
        colors = terminal and not os.environ.get("NO_COLOR")
        plain = structlog.dev.plain_traceback
        # The first argument is the padding of the event; its name differs between the versions in our range.
        render += [_compact, structlog.dev.ConsoleRenderer(0, colors=colors, exception_formatter=plain)]
    structlog.configure(
        processors=[structlog.processors.add_log_level, stamp, *render],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(out),
        cache_logger_on_first_use=False,
    )
    handler = _OurHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_log_level, structlog.stdlib.add_logger_name, stamp],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _OurHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(number if number <= logging.DEBUG else max(number, logging.WARNING))
    sys.excepthook = _log_crash


def _log_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Log what ends the process: a traceback printed by the interpreter would not be redacted."""
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    else:
        structlog.get_logger().critical("crashed", exc_info=(kind, error, trace))


def _compact(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Return a `decision` as one short line for people; any other event as it is."""
    if event.get("event") != "decision":
        return event
    score, demand, forecast = event["score"] or {}, event["demand"], event["forecast"]
    current, desired = event["current_replicas"], event["desired_replicas"]
    shown = [
        f"{event['policy']}: {current} -> {desired}" if current != desired else f"{event['policy']}: {current}",
        f"{event['action']} {event['reason']}" + (f" ({event['outcome']})" if event["action"] != "hold" else ""),
        f"ready {event['ready_replicas']}/{current}",
        f"score {_number(score.get('value'))} {score.get('binds', '')}".rstrip(),
        f"demand {_number(demand['value'])} {demand.get('binds', demand.get('gap', ''))}".rstrip(),
    ]
    if "top" in forecast:
        shown.append(f"forecast {_number(forecast['top'])} in {forecast['horizon_s']:.0f}s")
    if event["mode"] != "normal":
        shown.append(f"mode {event['mode']}")
    if event.get("bounds"):
        shown.append(event["bounds"])
    if event.get("approval"):
        shown.append(f"proposal {event['approval']['id']} {event['approval']['state']}")
    if event["steps"]:
        shown.append("steps " + ", ".join(event["steps"]))
    if event["gaps"]:
        shown.append("gaps " + ", ".join(f"{reason} x{gap['count']}" for reason, gap in event["gaps"].items()))
    if event["unblocks"]:
        shown.append("next " + "; ".join(event["unblocks"]))
    if event.get("dry_run"):
        shown.append("dry-run")
    head = {key: event[key] for key in ("timestamp", "level") if key in event}
    return {**head, "event": "  ".join(shown)}


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"
