"""Prometheus text format 0.0.4, on bytes: only the wanted series of a page, and little work for a page seen before.

Pages of one exporter hardly change but for their numbers. So the text in front of each value is a key into a cache:
a line seen before costs one look-up, a line that nobody wants the same, and only a new line is really parsed.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_BODY = 8 * 1024 * 1024
MAX_LINE = 64 * 1024
MAX_CACHED_HEAD = 4096

_NAME = re.compile(rb"[ \t\r]*((?!#)[^\s{]*)[ \t]*(\{?)")
_LABEL = re.compile(
    rb"""[ \t]*(?:([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"([^"\\]*(?:\\.[^"\\]*)*)"[ \t]*)?([,}])""", re.DOTALL
)
_ESCAPE = re.compile(rb'\\([\\n"])')
_UNESCAPED = {b"\\": b"\\", b'"': b'"', b"n": b"\n"}
_EXEMPLAR = re.compile(rb"[ \t]#")


class SeriesKey(NamedTuple):
    """Which series: its name and its labels, sorted by label name."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()


class Series(NamedTuple):
    """One sample of a page."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The wanted series of one page, in its order.

    Args:
        keys: which series. Pages of one layout hold the very same key objects, so comparing two pages is cheap.
        values: as many, as written: NaN, infinities and duplicates are left to the reader.
        bad: lines of wanted series that could not be read, counted by the series' name.
    """

    keys: tuple[SeriesKey, ...] = ()
    values: tuple[float, ...] = ()
    bad: Mapping[str, int] = field(default_factory=dict)

    def series(self) -> Iterator[Series]:
        """Yield the samples one by one."""
        for key, value in zip(self.keys, self.values, strict=True):
            yield Series(key.name, dict(key.labels), value)


def make_page(series: Iterable[Series]) -> Page:
    """Return a page of samples that came by another way than the text format."""
    known = list(series)
    keys = tuple(SeriesKey(each.name, tuple(sorted(each.labels.items()))) for each in known)
    return Page(keys=keys, values=tuple(each.value for each in known))


class SeriesCache:
    """What was learned about the lines of earlier pages; keep one per kind of page and pass it to `parse_page`.

    Lines that no page had for `pages` pages (at most twice that) are forgotten, and all but the newest when there
    are more than `max_lines`, so that labels which change for ever cannot fill the memory.

    Args:
        wanted: says of a series' name whether to read it; must always answer the same. Names that need quotes are
            never wanted.
    """

    def __init__(self, wanted: Callable[[str], bool], *, pages: int = 4096, max_lines: int = 32768) -> None:
        self.wanted = wanted
        self._pages = pages
        self._max_lines = max_lines
        self._seen = 0
        self._young: dict[bytes, SeriesKey | None] = {}
        self._old: dict[bytes, SeriesKey | None] = {}

    def __len__(self) -> int:
        """Count the lines remembered."""
        return len(self._young) + len(self._old)

    def turn_page(self) -> dict[bytes, SeriesKey | None]:
        """Start a page; return the lines in use: text before the value to its key, None for an unwanted line."""
        self._seen += 1
        if self._seen >= self._pages or len(self._young) > self._max_lines:
            self._seen, self._old, self._young = 0, self._young, {}
        return self._young

    def recall(self, head: bytes) -> SeriesKey | None:
        """Return the key of a line that was in use until lately, and remember it anew. Raises KeyError."""
        key = self._old.pop(head)
        self._young[head] = key
        return key

    def learn(self, head: bytes, key: SeriesKey | None) -> None:
        """Remember a line, unless it is too long to be worth it or has no blank in front of its value."""
        if 0 < len(head) <= MAX_CACHED_HEAD:
            self._young[head] = key


def parse_page(body: bytes, cache: SeriesCache) -> Page:
    """Return the series of a page that the cache's `wanted` asks for.

    A line that cannot be read is counted in `Page.bad` and skipped; the rest of the page is used. A last line without
    a line feed may have been cut within its number, so it counts as bad too. No body raises.
    """
    known = cache.turn_page()
    lines = body.split(b"\n")
    cut = lines.pop()
    keys: list[SeriesKey] = []
    numbers: list[bytes] = []
    bad: Counter[str] = Counter()
    for line in lines:
        head, _, number = line.rpartition(b" ")
        key = known.get(head, _UNKNOWN)
        if key is None:
            continue
        if key is _UNKNOWN:
            found = _read_line(line, head, number, cache, bad)
            if found is None:
                continue
            key, number = found
        keys.append(key)
        numbers.append(number)
    name = _name(cut)
    if name and cache.wanted(name):
        bad[name] += 1
    return _page(keys, numbers, bad)


_UNKNOWN = SeriesKey("")


def _page(keys: list[SeriesKey], numbers: list[bytes], bad: Counter[str]) -> Page:
    """Convert the numbers: all at once, or one by one when any is odd."""
    try:
        values = tuple(map(_number, numbers))
    except ValueError:
        good = []
        for key, number in zip(keys, numbers, strict=True):
            try:
                good.append((key, _number(number)))
            except ValueError:
                bad[key.name] += 1
        keys = [key for key, _ in good]
        values = tuple(value for _, value in good)
    return Page(keys=tuple(keys), values=values, bad=bad)


def _number(text: bytes) -> float:
    """Return the number as the format writes it; Python's `1_000` is none. Raises ValueError."""
    if b"_" in text:
        raise ValueError("not a number")
    return float(text)


def _name(line: bytes) -> str:
    """Return the name that a line starts with; "" for a comment, a blank line, or a name in quotes."""
    match = _NAME.match(line)
    return match[1].decode("utf-8", "replace") if match else ""


def _read_line(
    line: bytes, head: bytes, number: bytes, cache: SeriesCache, bad: Counter[str]
) -> tuple[SeriesKey, bytes] | None:
    """Read a line that the cache does not know: return key and number; None when unwanted or bad."""
    try:
        recalled = cache.recall(head)
    except KeyError:
        pass
    else:
        return None if recalled is None else (recalled, number)
    name = _name(line)
    if not name or not cache.wanted(name):
        if head.endswith(b"}") or b" " not in head or head.startswith(b"#"):
            cache.learn(head, None)
        return None
    try:
        key, value, rest = _split_sample(name, line)
    except ValueError:
        bad[name] += 1
        return None
    if not rest and value == number.strip():
        cache.learn(head, key)
    return key, value


def _split_sample(name: str, line: bytes) -> tuple[SeriesKey, bytes, list[bytes]]:
    """Return key, number and what follows the number. Raises ValueError."""
    start = _NAME.match(line)
    if start is None or len(line) > MAX_LINE:
        raise ValueError("no name, or too long")
    labels, end = _labels(line, start.end()) if start[2] else ((), start.end())
    text = line[end:]
    exemplar = _EXEMPLAR.search(text)
    words = text[: exemplar.start()].split() if exemplar else text.split()
    if not 1 <= len(words) <= 2:
        raise ValueError("not a number and at most a time")
    if len(words) == 2:
        _number(words[1])
    rest = words[1:] if exemplar is None else [*words[1:], b"#"]
    return SeriesKey(name, labels), words[0], rest


def _labels(line: bytes, at: int) -> tuple[tuple[tuple[str, str], ...], int]:
    """Return the labels that start at `at`, behind the brace, and where they end. Raises ValueError."""
    labels: dict[str, str] = {}
    while True:
        match = _LABEL.match(line, at)
        if match is None:
            raise ValueError("labels")
        at = match.end()
        if match[1] is not None:
            label = match[1].decode("ascii")
            if label in labels:
                raise ValueError("label twice")
            labels[label] = _ESCAPE.sub(_unescape, match[2]).decode("utf-8")
        if match[3] == b"}":
            return tuple(sorted(labels.items())), at


def _unescape(match: re.Match[bytes]) -> bytes:
    return _UNESCAPED[match[1]]
