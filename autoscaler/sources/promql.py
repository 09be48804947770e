"""PromQL as text: literals that nothing leaves, placeholders, and what can be told of a query by reading it."""

import re
from collections.abc import Iterable

from autoscaler.core.policy import Query
from autoscaler.core.types import Pod, PodPhase, TargetStatus

_QUOTED = r""""(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|`[^`]*`"""
_PLACE = r"\$(?P<{}>namespace|deployment|pods)\b"
_PIECE = re.compile(
    rf"#[^\n]*|(?P<regex>[=!]~)?(?P<space>\s*)(?:(?P<quoted>{_QUOTED})|{_PLACE.format('bare')})", re.DOTALL
)
_INNER_PLACE = re.compile(_PLACE.format("name"))
_TEXT = re.compile(rf"#[^\n]*|{_QUOTED}", re.DOTALL)
_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_SELECTOR = rf"""(?:{_NAME}\s*(?:\{{(?:[^"'`{{}}]|{_QUOTED})*\}})?|\{{(?:[^"'`{{}}]|{_QUOTED})*\}})"""
_PLAIN = re.compile(rf"\s*({_SELECTOR})\s*", re.DOTALL)
_AGGREGATED = re.compile(
    rf"\s*(?:sum|min|max|avg)\s*(?:(?:by|without)\s*\([^()]*\)\s*)?\(\s*({_SELECTOR})\s*\)\s*", re.DOTALL
)
_RANGE = re.compile(r"\[\s*((?:\d+(?:ms|[smhdwy]))+|\d+(?:\.\d+)?)\s*\]")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdwy]?)")
_SECONDS = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0, "y": 31536000.0}
_REGEX_META = re.compile(r"[\\.+*?()|\[\]{}^$]")


def escape(text: str, quote: str = '"') -> str:
    """Return `text` as it stands inside a PromQL string that `quote` delimits."""
    return text.replace("\\", "\\\\").replace(quote, "\\" + quote).replace("\n", "\\n").replace("\r", "\\r")


def string_literal(text: str) -> str:
    """Return a PromQL string that means exactly `text`."""
    return f'"{escape(text)}"'


def escape_regex(text: str) -> str:
    """Return a regular expression, in Prometheus' dialect, that matches exactly `text`."""
    return _REGEX_META.sub(r"\\\g<0>", text)


def any_of(names: Iterable[str]) -> str:
    """Return a PromQL string for a `=~` matcher that matches exactly one of `names`."""
    return string_literal("|".join(escape_regex(name) for name in names))


def fill(query: str, target: TargetStatus) -> str:
    """Return `query` with `$namespace`, `$deployment` and `$pods` (the live ones) put in as literals.

    Inside quotes the value takes the place of the name, escaped for that string, and as a regular expression after
    `=~` and `!~`; outside quotes it brings its own. No value can leave its string. Comments go.
    """
    names = {
        "namespace": [target.namespace],
        "deployment": [target.name],
        "pods": [pod.name for pod in live_pods(target)],
    }

    def value(name: str, regex: bool) -> str:
        regex = regex or name == "pods"
        return "|".join(escape_regex(each) if regex else each for each in names[name])

    def piece(match: re.Match[str]) -> str:
        regex, quoted, bare = match["regex"] is not None, match["quoted"], match["bare"]
        if bare is not None:
            return f"{match['regex'] or ''}{match['space']}{string_literal(value(bare, regex))}"
        if quoted is None:
            return ""
        quote, text = quoted[0], quoted[1:-1]
        if quote == "`":
            text = string_literal(_INNER_PLACE.sub(lambda inner: value(inner["name"], regex), text))
        else:
            text = quote + _INNER_PLACE.sub(lambda inner: escape(value(inner["name"], regex), quote), text) + quote
        return f"{match['regex'] or ''}{match['space']}{text}"

    return _PIECE.sub(piece, query)


def needs_pods(query: str) -> bool:
    """Return whether the query names `$pods`."""
    return any(match["name"] == "pods" for match in _INNER_PLACE.finditer(query))


def age_query(expr: str) -> str | None:
    """Return a query for the time of the oldest sample that `expr` reads; None where only the server could tell.

    Known for a plain selector and for one aggregation of it. `timestamp()` of anything else is the evaluation's time.
    """
    match = _PLAIN.fullmatch(expr) or _AGGREGATED.fullmatch(expr)
    return f"min(timestamp({match[1]}))" if match else None


def shortest_range_s(expr: str) -> float | None:
    """Return the shortest range, such as `[5m]`, in a query; None without one. A subquery's is none of scrapes."""
    found = [
        sum(float(count) * _SECONDS[unit] for count, unit in _DURATION.findall(text))
        for text in _RANGE.findall(_TEXT.sub("", expr))
    ]
    return min(found, default=None)


def range_problem(query: Query) -> str:
    """Return what is wrong with a query's range for its scrape interval; "" when nothing is.

    Source: `rate` needs two samples in its range, and one scrape may fail: four intervals are the usual advice.
    """
    range_s = shortest_range_s(query.query)
    if range_s is None or range_s >= 2 * query.scrape_interval_s:
        return ""
    interval_s = query.scrape_interval_s
    return f"range {range_s:g}s is below twice the scrape interval ({interval_s:g}s): use at least {4 * interval_s:g}s"


def live_pods(target: TargetStatus) -> list[Pod]:
    """Return the pods whose series count: running, and not going away."""
    return [pod for pod in target.pods if pod.phase is PodPhase.RUNNING and not pod.terminating]
