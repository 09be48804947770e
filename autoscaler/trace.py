"""Recordings: the ticks of any number of policies as gzip-compressed JSON Lines, exact to the bit.

The first key of a line says what it is. The first line is the header, with the format's version:

    {"format": "autoscaler-trace", "version": 1, "created_by": ..., "columns": [the names of the engines' columns]}
    {"policy": name, "plain": the policy}              when a policy is loaded, and again when it is reloaded
    {"tick": policy's name, "outcome": ..., "at": ...} a snapshot: what changed since that policy's tick before
    {"decision": ..., "duration_s": ...}               after each tick
    {"memory": policy's name, "at": ..., "plain": ...} what another process knew, taken in before the next tick

A tick line goes on with what `core.delta` says of the snapshot. Each tick is handed to the operating system at once and
whole: a killed process costs no tick that it had reported, and at most leaves a torn last line.
"""

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from autoscaler.core import delta
from autoscaler.core.memory import Memory, memory_from_plain, memory_to_plain
from autoscaler.core.plain import Plain, to_number, to_plain
from autoscaler.core.types import Decision, Outcome, Snapshot
from autoscaler.errors import TraceError

FORMAT = "autoscaler-trace"
VERSION = 1

_GZIP = 31
_MAGIC = b"\x1f\x8b\x08"
_LEVEL = 6
_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 26

_Json = dict[str, Any]
_decode_json = json.JSONDecoder().raw_decode
_encode_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLine:
    """A policy was loaded, or loaded anew: its name, and its plain form as it was given to the recorder."""

    name: str
    plain: _Json


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryLine:
    """What another process knew was taken in at `at`."""

    policy: str
    at: float
    memory: Memory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TickLine:
    """One tick of one policy.

    Args:
        decision: the recorded decision in its plain form; None where decisions are not read.
        duration_s: how long the tick took; None where decisions are not read.
        line: where it stands in the file, from 1.
    """

    policy: str
    snapshot: Snapshot
    outcome: Outcome
    decision: _Json | None
    duration_s: float | None
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TornEnd:
    """The recording was not closed: its writer was killed, or the disk was full.

    Args:
        line: the first line that is missing or cut.
        cut: something of that tick is there and was skipped; else the file ends between two ticks.
    """

    line: int
    cut: bool

    def __str__(self) -> str:
        what = "is cut off, its tick was skipped" if self.cut else "is missing: the recording was not closed"
        return f"line {self.line} {what}"


class Recorder:
    """Writes ticks to a new file; a `ports.Report`.

    When the disk is full or fails, recording stops for good and `failure` says why; what was written stays readable.
    """

    def __init__(self, path: str | os.PathLike[str], created_by: str) -> None:
        """Create the file. Raises TraceError when it cannot be written, or already holds something."""
        self.failure: str | None = None
        self._path = Path(path)
        self._known: dict[str, delta.Known] = {}
        self._deflater = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
        self._file: BinaryIO | None = _open_new(self._path)
        self._write({"format": FORMAT, "version": VERSION, "created_by": created_by, "columns": delta.COLUMNS})
        if self.failure is not None:
            raise TraceError(self.failure)

    def policy(self, name: str, plain: Mapping[str, Plain]) -> None:
        """Take note of a policy that was loaded; it comes back as it is given here."""
        self._write({"policy": name, "plain": to_plain(plain)})

    def memory(self, policy: str, at: float, memory: Memory) -> None:
        """Take note of what another process knew of the policy's target, taken in at `at`."""
        self._write({"memory": policy, "at": at, "plain": memory_to_plain(memory)})

    def tick(self, policy: str, snapshot: Snapshot, decision: Decision, outcome: Outcome, duration_s: float) -> None:
        """Take note of one tick."""
        if self._file is None:
            return
        if policy not in self._known:
            self._known[policy] = delta.Known()
        line = {"tick": policy, "outcome": outcome.value, **delta.encode(self._known[policy], snapshot)}
        self._write(line, {"decision": to_plain(decision), "duration_s": to_plain(duration_s)})

    def close(self) -> None:
        """Finish the file. A second call does nothing."""
        if self._file is not None:
            self._put(self._deflater.flush())
        self._drop_file()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _write(self, *lines: _Json) -> None:
        if self._file is not None:
            text = "".join([_encode_json(line) + "\n" for line in lines])
            self._put(self._deflater.compress(text.encode()) + self._deflater.flush(zlib.Z_SYNC_FLUSH))

    def _put(self, data: bytes) -> None:
        if self._file is None:
            return
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            self.failure = f"{self._path}: recording stopped: {_os_message(error)}"
            self._drop_file()

    def _drop_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:  # closing writes what the failed write left in the buffer
                self.failure = self.failure or f"{self._path}: recording stopped: {_os_message(error)}"


def read_trace(path: str | os.PathLike[str], *, decisions: bool) -> "TraceReader":
    """Return the recording's events, to be read once, in the order they were recorded.

    Args:
        decisions: also read the decisions; skipping them is faster.
    Raises: TraceError, when there is no such file, it is no recording, or a newer version wrote it.
    """
    return TraceReader(path, decisions=decisions)


class TraceReader:
    """Iterates over the events of a recording, holding one chunk of it at a time. Raises TraceError at a damaged line.

    Attributes:
        header: the first line; empty when even that is torn.
        torn: how the file ends, once all was read; None when it was closed properly.
        position, size: bytes read, and of the whole file; the file may still be growing.
    """

    def __init__(self, path: str | os.PathLike[str], *, decisions: bool) -> None:
        """Open the file and read its header; see `read_trace`."""
        self.torn: TornEnd | None = None
        self.position = 0
        self._path = Path(path)
        self._decisions = decisions
        self._number = 0
        try:
            self._file = self._path.open("rb")
        except OSError as error:
            raise TraceError(f"{path}: cannot be read: {_os_message(error)}") from error
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            self._lines = self._read_lines()
            self.header = self._read_header()
        except BaseException:
            self.close()
            raise
        self._columns = tuple(self.header.get("columns", ()))
        self._known: dict[str, delta.Known] = {}

    def __iter__(self) -> Iterator[PolicyLine | MemoryLine | TickLine]:
        waiting: bytes | None = None  # a tick line, until its decision line shows that it is whole
        for line in self._lines:
            if waiting is not None:
                yield self._tick(waiting, line)
                waiting = None
            elif line.startswith(b'{"tick"'):
                waiting = line
            elif line.startswith(b'{"memory"'):
                yield self._memory(line)
            else:
                yield self._policy(line)
        if waiting is not None:
            self.torn = TornEnd(line=self._number + 1, cut=True)
        self.close()

    def close(self) -> None:
        """Close the file, wherever reading stands."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _read_header(self) -> _Json:
        line = next(self._lines, None)
        if line is None:
            return {}
        header = self._parse(line)
        version = header.get("version")
        if header.get("format") != FORMAT or not isinstance(version, int):
            raise self._error(f'no recording: the first line must say "format": "{FORMAT}" and a version')
        if version > VERSION:
            writer = header.get("created_by", "an unknown program")
            raise self._error(f"version {version}, written by {writer}: this program reads versions up to {VERSION}")
        if not isinstance(header.get("columns"), list):
            raise self._error("no recording: the first line must list the columns")
        return header

    def _policy(self, line: bytes) -> PolicyLine:
        content = self._parse(line, "policy", "plain")
        return PolicyLine(name=content["policy"], plain=content["plain"])

    def _memory(self, line: bytes) -> MemoryLine:
        content = self._parse(line, "memory", "at", "plain")
        try:
            memory = memory_from_plain(content["plain"])
            return MemoryLine(policy=str(content["memory"]), at=float(content["at"]), memory=memory)
        except (TypeError, ValueError) as error:
            raise self._error(f"damaged memory: {error}") from error

    def _tick(self, tick_line: bytes, decision_line: bytes) -> TickLine:
        at_line = self._number - 1
        if not decision_line.startswith(b'{"decision"'):
            raise self._error("the decision of the tick before is missing")
        recorded = self._parse(decision_line, "decision", "duration_s") if self._decisions else {}
        self._number = at_line
        tick = self._parse(tick_line, "tick", "outcome")
        policy = str(tick["tick"])
        if policy not in self._known:
            self._known[policy] = delta.Known(columns=self._columns)
        try:
            event = TickLine(
                policy=policy,
                snapshot=delta.decode(self._known[policy], tick),
                outcome=Outcome(tick["outcome"]),
                decision=recorded.get("decision"),
                duration_s=to_number(recorded.get("duration_s")),
                line=at_line,
            )
        except ValueError as error:
            raise self._error(f"damaged tick: {error}") from error
        self._number = at_line + 1
        return event

    def _parse(self, line: bytes, *keys: str) -> _Json:
        """Return a line's content, which has at least these keys."""
        try:
            text = line.decode()
            content, end = _decode_json(text)
            if text[end:].strip():
                raise ValueError(f"more after column {end}")
        except (ValueError, RecursionError) as error:
            raise self._error(f"not JSON: {error}") from error
        if not isinstance(content, dict) or not all(map(content.__contains__, keys)):
            raise self._error(f"no line of this format: it must have {', '.join(keys) or 'keys'}")
        return content

    def _error(self, problem: str) -> TraceError:
        return TraceError(f"{self._path}: line {self._number}: {problem}")

    def _read_lines(self) -> Iterator[bytes]:
        """Yield whole lines, with `_number` at each one's; afterwards `torn` says how the file ends."""
        inflater = zlib.decompressobj(_GZIP)
        rest = b""
        while chunk := self._read_chunk():
            for text in self._inflate(inflater, chunk):
                *lines, rest = (rest + text).split(b"\n")
                for line in lines:
                    self._number += 1
                    yield line
                if len(rest) > _LONGEST_LINE:
                    raise self._damage("the line does not end")
        if not inflater.eof or rest:
            self.torn = TornEnd(line=self._number + 1, cut=bool(rest))

    def _read_chunk(self) -> bytes:
        try:
            chunk = self._file.read(_CHUNK)
        except OSError as error:
            raise TraceError(f"{self._path}: cannot be read: {_os_message(error)}") from error
        if self.position == 0 and not _MAGIC.startswith(chunk[: len(_MAGIC)]):
            raise TraceError(f"{self._path}: line 1: this is no recording: it is not gzip-compressed")
        self.position += len(chunk)
        return chunk

    def _inflate(self, inflater: "zlib._Decompress", chunk: bytes) -> Iterator[bytes]:
        """Yield the chunk's text. On damage, first what stands before it, so that the error can name its line."""
        if inflater.eof:
            raise self._damage("there is data after the end of the recording")
        start = inflater.copy()
        try:
            text = inflater.decompress(chunk)
        except zlib.error as error:
            yield _inflate_until_damage(start, chunk)
            raise self._damage(f"damaged: {error}") from error
        yield text
        if inflater.unused_data:
            raise self._damage("there is data after the end of the recording")

    def _damage(self, problem: str) -> TraceError:
        self._number += 1
        return self._error(problem)


def _inflate_until_damage(inflater: "zlib._Decompress", chunk: bytes) -> bytes:
    text = b""
    for index in range(len(chunk)):
        try:
            text += inflater.decompress(chunk[index : index + 1])
        except zlib.error:
            break
    return text


def _open_new(path: Path) -> BinaryIO:
    try:
        file = path.open("ab")
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {_os_message(error)}") from error
    if os.fstat(file.fileno()).st_size > 0:
        file.close()
        raise TraceError(f"{path}: already holds data, which is never overwritten: record to a new file")
    return file


def _os_message(error: OSError) -> str:
    return error.strerror or str(error)
