"""The client of the Prometheus HTTP API: recorded answers, made-up ones, and what it sends."""

import asyncio
import json
import logging
import math
import shutil
import socket
import ssl
import subprocess
import traceback
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import httpx
import pytest
from aiohttp import web

from autoscaler.core.policy import PrometheusServer
from autoscaler.core.types import GapReason
from autoscaler.errors import SourceError
from autoscaler.sources.prometheus_api import MAX_BODY_BYTES, Answer, PrometheusClient, parse_answer

RECORDED = Path(__file__).parent.parent / "data" / "prometheus"
AT = 1764500000.0
EMPTY = {"status": "success", "data": {"resultType": "vector", "result": []}}


class FakeClock:
    """A clock that a test sets; sleeping sets it forward."""

    def __init__(self, at: float = AT) -> None:
        self.at = at

    def now(self) -> float:
        return self.at

    async def sleep_until(self, at: float) -> None:
        self.at = max(self.at, at)


class FakeServer:
    """Stands in for the network: gives its answers in turn, the last one for ever, and keeps the requests."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers[min(len(self.requests), len(self.answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)

    @property
    def forms(self) -> list[dict[str, str]]:
        """The forms that were posted."""
        return [{name: values[0] for name, values in parse_qs(r.content.decode()).items()} for r in self.requests]


def client_of(
    server: FakeServer, clock: FakeClock | None = None, url: str = "http://prometheus:9090", **settings: Any
) -> PrometheusClient:
    """Return a client of a fake server."""
    return PrometheusClient(
        PrometheusServer(url=url, **settings), clock or FakeClock(), transport=httpx.MockTransport(server)
    )


async def reason_of(client: PrometheusClient, at: float = AT) -> tuple[str, str]:
    """Return reason and detail of a query that must fail."""
    with pytest.raises(SourceError) as error:
        await client.query("up", at)
    assert error.value.source == "prometheus"
    assert len(error.value.detail) <= 200
    return error.value.reason, error.value.detail


def vector(*values: str, **more: object) -> httpx.Response:
    """Return an answer with a row per value."""
    rows = [{"metric": {"row": str(index)}, "value": [AT, value]} for index, value in enumerate(values)]
    return httpx.Response(200, json={"status": "success", "data": {"resultType": "vector", "result": rows}, **more})


# Recorded answers

OUTCOMES: Mapping[str, int | GapReason] = {
    "error_400_missing_query.json": GapReason.QUERY_ERROR,
    "error_400_parse.json": GapReason.QUERY_ERROR,
    "error_400_resolution.json": GapReason.QUERY_ERROR,
    "error_400_time.json": GapReason.QUERY_ERROR,
    "error_404_path.json": GapReason.HTTP_STATUS,
    "error_422_duplicate_labelset.json": GapReason.QUERY_ERROR,
    "error_422_many_to_many.json": GapReason.QUERY_ERROR,
    "error_422_too_many_samples.json": GapReason.QUERY_ERROR,
    "error_503_timeout.json": GapReason.TRANSIENT,
    "instant_empty.json": 0,
    "instant_fb_used_honor_labels_false.json": 8,
    "instant_fb_used_honor_labels_true.json": 8,
    "instant_fraction_under_2s.json": 1,
    "instant_matrix_selector.json": GapReason.QUERY_ERROR,
    "instant_memory_ratio_by_pod.json": 6,
    "instant_memory_ratio_timeslice.json": 4,
    "instant_memory_ratio_timeslice_naive.json": 0,
    "instant_mig_gpu_util_empty.json": 0,
    "instant_mig_utilisation.json": 4,
    "instant_native_fraction.json": 1,
    "instant_native_histogram.json": 1,
    "instant_native_quantile.json": 1,
    "instant_p99_e2e.json": 1,
    "instant_p99_no_traffic_nan.json": 1,
    "instant_post.json": 1,
    "instant_quantile_vectors.json": 17,
    "instant_scalar.json": 1,
    "instant_special_values.json": 5,
    "instant_string.json": GapReason.QUERY_ERROR,
    "instant_sum_by_le_mixed_layouts.json": 1,
    "instant_vllm_names.json": 6,
    "instant_xid_nonzero.json": 1,
    "range_empty.json": GapReason.QUERY_ERROR,
    "range_kv_usage.json": GapReason.QUERY_ERROR,
    "range_native_histogram.json": GapReason.QUERY_ERROR,
    "status_buildinfo.json": GapReason.BAD_BODY,
    "targets_up.json": 11,
}


def recorded(name: str) -> httpx.Response:
    """Return a recorded answer."""
    response = json.loads((RECORDED / name).read_text())["response"]
    body = response["body"]
    content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    return httpx.Response(response["status"], headers={"content-type": response["content_type"]}, content=content)


def test_every_recorded_answer_has_an_outcome() -> None:
    assert set(OUTCOMES) == {path.name for path in RECORDED.glob("*.json")} - {"quantile_vectors.json"}


@pytest.mark.parametrize("name", OUTCOMES)
async def test_recorded_answers(name: str) -> None:
    client = client_of(FakeServer(recorded(name)))
    expected = OUTCOMES[name]
    if isinstance(expected, GapReason):
        reason, detail = await reason_of(client)
        assert reason == expected
        assert detail
    else:
        assert len((await client.query("up", AT)).rows) == expected
    await client.close()


def values(name: str, label: str) -> dict[str, float | None]:
    """Return the values of a recorded answer by one label."""
    return {row.labels.get(label, ""): row.value for row in parse_answer(recorded(name).content).rows}


def test_c041_special_values_stay_what_they_are() -> None:
    found = values("instant_special_values.json", "k")
    assert found["inf"] == math.inf
    assert found["ninf"] == -math.inf
    assert math.isnan(found["nan"] or 0.0)
    assert found["big"] == 9223372036854776000.0
    assert found["small"] == 1.7e-308


def test_native_histogram_is_no_number() -> None:
    assert values("instant_native_histogram.json", "model_name") == {"m": None}


def test_recorded_quantiles() -> None:
    vectors = json.loads((RECORDED / "quantile_vectors.json").read_text())["quantile"]
    expected = {each["id"]: math.nan if each["expected"] is None else float(each["expected"]) for each in vectors}
    found = values("instant_quantile_vectors.json", "vec")
    assert found.keys() == expected.keys()
    assert [found[name] for name in sorted(found)] == pytest.approx(
        [expected[name] for name in sorted(found)], rel=1e-6, nan_ok=True
    )


# Odd bodies


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param(b"", GapReason.BAD_BODY, id="nothing"),
        pytest.param(b"<html>login</html>", GapReason.BAD_BODY, id="c046-html"),
        pytest.param(b'{"status":"success","data":{"resultType":"vec', GapReason.BAD_BODY, id="cut"),
        pytest.param(b"\xff\xfe\x00", GapReason.BAD_BODY, id="not-text"),
        pytest.param(b"[" * 200_000, GapReason.BAD_BODY, id="nested-too-deep"),
        pytest.param(b"[1]", GapReason.BAD_BODY, id="a-list"),
        pytest.param(b'{"status":"success"}', GapReason.BAD_BODY, id="no-data"),
        pytest.param(b'{"data":{"resultType":"vector","result":{}}}', GapReason.BAD_BODY, id="rows-are-no-list"),
        pytest.param(
            b'{"status":"error","errorType":"execution","error":"x"}', GapReason.QUERY_ERROR, id="error-at-200"
        ),
    ],
)
async def test_odd_bodies(body: bytes, reason: GapReason) -> None:
    client = client_of(FakeServer(httpx.Response(200, content=body)))
    assert (await reason_of(client))[0] == reason


@pytest.mark.parametrize(
    "element",
    [
        pytest.param({"metric": {"pod": "a"}}, id="no-value"),
        pytest.param({"metric": {"pod": "a"}, "value": [AT, "many"]}, id="no-number"),
        pytest.param({"metric": {"pod": "a"}, "value": [AT]}, id="cut"),
        pytest.param({"metric": {"pod": "a"}, "value": [AT, None]}, id="null"),
        pytest.param({"metric": {"pod": "a"}, "histogram": {}}, id="odd-histogram"),
        pytest.param({"metric": [], "value": [AT, "x"]}, id="odd-labels"),
        pytest.param("row", id="no-object"),
    ],
)
def test_a_bad_row_is_not_a_number_and_leaves_the_others(element: object) -> None:
    good = {"metric": {"pod": "b"}, "value": [AT, "2"]}
    body = {"status": "success", "data": {"resultType": "vector", "result": [element, good]}}
    bad_row, good_row = parse_answer(json.dumps(body).encode()).rows
    assert bad_row.value is not None
    assert math.isnan(bad_row.value)
    assert (good_row.labels, good_row.value, good_row.at) == ({"pod": "b"}, 2.0, AT)


def test_c042_warnings_and_infos_stand_beside_the_data() -> None:
    body = vector("2", warnings=["store 2 is down", "store 2 is down"], infos=["x" * 500]).content
    answer = parse_answer(body)
    assert len(answer.rows) == 1
    assert answer.warnings == ("store 2 is down",)
    assert [len(text) for text in answer.infos] == [200]


# What is sent


async def test_what_is_posted() -> None:
    server = FakeServer(vector("1"))
    client = client_of(server, url="http://prometheus:9090/prefix/?dedup=true", headers={"X-Scope-OrgID": "team-a"})
    answer = await client.query('up{a="b"}', AT)
    request = server.requests[0]
    assert answer.rows[0].value == 1.0
    assert (request.method, str(request.url)) == (
        "POST",
        "http://prometheus:9090/prefix/api/v1/query?dedup=true",
    )
    assert server.forms[0]["query"] == 'up{a="b"}'
    assert server.forms[0]["time"] == "1764500000.000"
    assert 3500.0 < float(server.forms[0]["timeout"].removesuffix("ms")) < 4000.0, "below our own four seconds"
    assert request.headers["x-scope-orgid"] == "team-a"
    assert "authorization" not in request.headers


@pytest.mark.parametrize(
    ("settings", "authorization"),
    [
        pytest.param({"bearer_token_file": "token"}, "Bearer tok-SECRET", id="bearer"),
        pytest.param({"username": "user", "password_file": "password"}, "Basic dXNlcjpwdy1TRUNSRVQ=", id="basic"),
        pytest.param({"url": "https://user:pw-SECRET@prom:9090"}, "Basic dXNlcjpwdy1TRUNSRVQ=", id="in-the-url"),
        pytest.param({"headers": {"Authorization": "ApiKey 1"}}, "ApiKey 1", id="a-header-of-ones-own"),
        pytest.param(
            {"bearer_token_file": "token", "headers": {"Authorization": "ApiKey 1"}},
            "Bearer tok-SECRET",
            id="token-wins",
        ),
    ],
)
async def test_authorization(settings: dict[str, Any], authorization: str, secrets: Path) -> None:
    server = FakeServer(vector("1"))
    client = client_of(server, **in_folder(settings, secrets))
    await client.query("up", AT)
    assert server.requests[0].headers.get_list("authorization") == [authorization]
    assert "SECRET" not in str(server.requests[0].url)


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """A folder with a token and a password."""
    (tmp_path / "token").write_text("tok-SECRET\n")
    (tmp_path / "password").write_text("pw-SECRET")
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "two-lines").write_text("tok-SECRET\nx: y")
    return tmp_path


def in_folder(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the settings with paths for names of files."""
    return {key: str(folder / value) if key.endswith("_file") else value for key, value in settings.items()}


async def test_a_rotated_token_is_taken_up(secrets: Path) -> None:
    server = FakeServer(vector("1"))
    client = client_of(server, bearer_token_file=str(secrets / "token"))
    await client.query("up", AT)
    (secrets / "token").write_text("second")
    await client.query("up", AT)
    assert [request.headers["authorization"] for request in server.requests] == ["Bearer tok-SECRET", "Bearer second"]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"bearer_token_file": "absent"}, id="no-file"),
        pytest.param({"bearer_token_file": "empty"}, id="empty-file"),
        pytest.param({"bearer_token_file": "binary"}, id="no-text"),
        pytest.param({"bearer_token_file": "two-lines"}, id="a-line-end-in-a-header"),
        pytest.param({"username": "user", "password_file": "absent"}, id="no-password"),
        pytest.param({"headers": {"X-Tenant": "tok-SECRET\n"}}, id="header-value"),
        pytest.param({"headers": {"X Tenant": "a"}}, id="header-name"),
    ],
)
async def test_credentials_that_cannot_be_sent(settings: dict[str, Any], secrets: Path) -> None:
    server = FakeServer(vector("1"))
    reason, detail = await reason_of(client_of(server, **in_folder(settings, secrets)))
    assert reason == GapReason.UNAUTHORIZED
    assert "SECRET" not in detail
    assert server.requests == []


@pytest.mark.parametrize("url", ["prometheus:9090", "ftp://prometheus", "http://", "http://[::1", "http://a:port"])
async def test_urls_that_cannot_be_used(url: str) -> None:
    assert (await reason_of(client_of(FakeServer(vector("1")), url=url)))[0] == GapReason.UNREACHABLE


# Failures


def plain(status: int, text: str = "", **headers: str) -> httpx.Response:
    return httpx.Response(status, text=text, headers={name.replace("_", "-"): value for name, value in headers.items()})


ERROR_422 = httpx.Response(422, json={"status": "error", "errorType": "execution", "error": "many-to-many"})
ERROR_400 = httpx.Response(400, json={"errorType": "bad_data", "error": "parse error"})


@pytest.mark.parametrize(
    ("answer", "reason", "detail", "requests"),
    [
        pytest.param(ERROR_422, "query_error", "HTTP 422: execution: many-to-many", 1, id="c046-a-422"),
        pytest.param(ERROR_400, "query_error", "HTTP 400: bad_data: parse error", 1, id="c046-b-400"),
        pytest.param(plain(503, "unavailable"), "transient", "HTTP 503: unavailable", 2, id="c046-c-503"),
        pytest.param(plain(502), "transient", "HTTP 502:", 2, id="502"),
        pytest.param(plain(504), "transient", "HTTP 504:", 2, id="504"),
        pytest.param(plain(200, "<html>login</html>"), "bad_body", "not JSON: <html>login</html>", 1, id="c046-d-html"),
        pytest.param(plain(429, retry_after="20"), "transient", "HTTP 429:", 1, id="c046-e-429"),
        pytest.param(plain(503, retry_after="20"), "transient", "HTTP 503:", 1, id="503-with-a-wish"),
        pytest.param(plain(401, "no"), "unauthorized", "HTTP 401: no", 1, id="401"),
        pytest.param(plain(403, "no"), "unauthorized", "HTTP 403: no", 1, id="403"),
        pytest.param(plain(404, "404 page not found\n"), "http_status", "HTTP 404: 404 page not found", 1, id="404"),
        pytest.param(plain(500, "oops"), "http_status", "HTTP 500: oops", 1, id="500"),
        pytest.param(plain(302, location="http://login/"), "http_status", "HTTP 302:", 1, id="redirect"),
        pytest.param(httpx.ConnectError("refused"), "transient", "ConnectError: refused", 2, id="refused"),
        pytest.param(httpx.ReadError("reset"), "transient", "ReadError: reset", 2, id="reset"),
        pytest.param(httpx.ReadTimeout("slow"), "timeout", "ReadTimeout", 1, id="slow"),
        pytest.param(
            plain(200, "{}", content_encoding="zstd"),
            "bad_body",
            "the body is compressed, which was not asked for",
            1,
            id="packed",
        ),
    ],
)
async def test_c046_failures_are_told_apart(
    answer: httpx.Response | Exception, reason: str, detail: str, requests: int
) -> None:
    server = FakeServer(answer)
    assert await reason_of(client_of(server)) == (reason, detail)
    assert len(server.requests) == requests


async def test_c046_not_more_than_200_characters_of_a_body_are_shown() -> None:
    _, detail = await reason_of(client_of(FakeServer(plain(200, "<p>" + "x" * 5000))))
    assert len(detail) == 200


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_a_second_try_within_the_cycle_can_succeed(status: int) -> None:
    server = FakeServer(plain(status), vector("7"))
    clock = FakeClock()
    answer = await client_of(server, clock).query("up", AT)
    assert answer.rows[0].value == 7.0
    assert server.forms[0]["time"] == server.forms[1]["time"]
    assert clock.at - AT < 1.0


@pytest.mark.parametrize(
    ("header", "wait_s"),
    [
        pytest.param("20", 20.0, id="seconds"),
        pytest.param("Sun, 30 Nov 2025 10:53:40 GMT", 20.0, id="a-date"),
        pytest.param("86400", 300.0, id="at-most-five-minutes"),
        pytest.param("soon", 0.0, id="nonsense"),
        pytest.param("nan", 0.0, id="not-a-number"),
        pytest.param("-5", 0.0, id="the-past"),
    ],
)
async def test_c046_e_no_request_before_retry_after(header: str, wait_s: float) -> None:
    server = FakeServer(plain(429, retry_after=header))
    clock = FakeClock()
    client = client_of(server, clock)
    await reason_of(client, AT)
    if wait_s:
        clock.at = AT + wait_s - 0.1
        assert (await reason_of(client, clock.at))[0] == GapReason.TRANSIENT
        assert len(server.requests) == 1
    clock.at = AT + wait_s
    await reason_of(client, clock.at)
    assert len(server.requests) == 2


async def test_a_server_that_fails_cycle_after_cycle_is_left_alone_for_longer_and_longer() -> None:
    server = FakeServer(httpx.ConnectError("refused"))
    clock = FakeClock()
    client = client_of(server, clock)
    asked = []
    for second in range(150):
        clock.at = AT + second
        before = len(server.requests)
        await reason_of(client, clock.at)
        if len(server.requests) > before:
            asked.append(second)
    assert asked == [0, 1, 7, 23, 54, 85, 116, 147]
    server.answers = [vector("1")]
    clock.at = AT + 200.0
    await client.query("up", clock.at)
    server.answers = [httpx.ConnectError("refused")]
    await reason_of(client, AT + 201.0)
    requests = len(server.requests)
    await reason_of(client, AT + 202.0)
    assert len(server.requests) == requests + 2, "a success makes good for all failures"


async def test_failures_of_one_cycle_count_once() -> None:
    server = FakeServer(plain(503))
    client = client_of(server)
    for _ in range(4):
        await reason_of(client)
    assert len(server.requests) == 8


async def test_a_server_that_hangs_is_left_in_time() -> None:
    async def hang(request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets the event")

    settings = PrometheusServer(url="http://prometheus:9090", timeout_s=0.05)
    client = PrometheusClient(settings, FakeClock(), transport=httpx.MockTransport(hang))
    assert await reason_of(client) == ("timeout", "no answer within 0.05 s")


class Endless(httpx.AsyncByteStream):
    """A body without end."""

    sent = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            self.sent += 2**16
            yield b" " * 2**16


@pytest.mark.parametrize("status", [200, 400])
async def test_a_body_without_end_is_left(status: int) -> None:
    body = Endless()

    async def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, stream=body)

    settings = PrometheusServer(url="http://prometheus:9090")
    client = PrometheusClient(settings, FakeClock(), transport=httpx.MockTransport(answer))
    assert (await reason_of(client))[0] == GapReason.BODY_TOO_LARGE
    assert body.sent <= MAX_BODY_BYTES + 2**17


# Secrets


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(plain(401, "bad credentials: Bearer tok-SECRET"), id="401-that-echoes"),
        pytest.param(plain(400, "x" * 180 + "tok-SECRET hdr-SECRET pw-SECRET"), id="400-cut-within"),
        pytest.param(plain(200, "<p>Basic dXNlcjpwdy1TRUNSRVQ= tok-SECRET pw-SECRET"), id="html-that-echoes"),
        pytest.param(
            httpx.Response(422, json={"error": "tok-SECRET hdr-SECRET pw-SECRET dXNlcjpwdy1TRUNSRVQ="}), id="api-error"
        ),
        pytest.param(httpx.ConnectError("[SSL] tok-SECRET pw-SECRET"), id="tls-error"),
        pytest.param(httpx.UnsupportedProtocol("pw-SECRET hdr-SECRET tok-SECRET"), id="protocol-error"),
    ],
)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"bearer_token_file": "token"}, id="bearer"),
        pytest.param({"username": "user", "password_file": "password"}, id="basic"),
        pytest.param({}, id="url"),
    ],
)
async def test_c144_credentials_are_shown_nowhere(
    settings: dict[str, Any], answer: httpx.Response | Exception, secrets: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    client = client_of(
        FakeServer(answer),
        url="https://user:pw-SECRET@prom:9090",
        headers={"X-Key": "hdr-SECRET"},
        **in_folder(settings, secrets),
    )
    with pytest.raises(SourceError) as error:
        await client.query("up", AT)
    await client.close()
    used = {"bearer_token_file": "tok-SECRET", "password_file": "pw-SECRET"}
    mine = {used[key] for key in settings if key in used} or {"pw-SECRET"}
    shown = f"{error.value} {error.value!r} {client!r} {caplog.text}"
    for secret in (*mine, "hdr-SECRET", "dXNlcjpwdy1TRUNSRVQ=" if mine == {"pw-SECRET"} else "hdr-SECRET"):
        assert secret not in shown
    assert "HTTP Request: POST https://prom:9090" in caplog.text or isinstance(answer, Exception)


# Real connections


@asynccontextmanager
async def listening(host: str, port: int = 0, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Serve an empty answer for every query on loopback; yield the port."""

    async def query(request: web.Request) -> web.Response:
        return web.json_response(EMPTY)

    app = web.Application()
    app.router.add_post("/api/v1/query", query)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, ssl_context=tls).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def test_c143_a_name_is_resolved_again_when_its_address_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name moves to another address, and the old one refuses: the next query arrives at the new one."""
    address = "127.0.2.1"
    resolve = socket.getaddrinfo

    def moving(host: str | bytes, *args: Any, **kwargs: Any) -> Any:
        return resolve(address if host in ("prom.test", b"prom.test") else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", moving)
    async with listening(address) as port:
        client = PrometheusClient(PrometheusServer(url=f"http://prom.test:{port}"), FakeClock())
        assert await client.query("up", AT) == Answer()
    address = "127.0.2.2"
    async with listening(address, port):
        assert await client.query("up", AT) == Answer()
        await client.close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two authorities, and of the first a server's and a client's certificate."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1\n")
    for words in _openssl_words():
        subprocess.run([openssl, *words], cwd=folder, check=True, capture_output=True)
    return folder


def _openssl_words() -> Iterator[list[str]]:
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout"]
    for name in ("ca", "other"):
        yield ["req", "-x509", *key, f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}", "-days", "2"]
    for name in ("server", "client"):
        yield ["req", *key, f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}"]
        sign = ["x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"]
        yield [*sign, "-extfile", "san", "-days", "2", "-out", f"{name}.pem"]


def serving_tls(folder: Path) -> ssl.SSLContext:
    """Return a server's context that wants a client's certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder / "ca.pem"))
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    context.verify_mode = ssl.CERT_REQUIRED
    return context


MTLS = {"cert_file": "client.pem", "key_file": "client.key"}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        pytest.param({"ca_file": "ca.pem", **MTLS}, None, id="mutual"),
        pytest.param({"insecure_skip_verify": True, **MTLS}, None, id="without-verifying"),
        pytest.param(MTLS, GapReason.TRANSIENT, id="unknown-authority"),
        pytest.param({"ca_file": "other.pem", **MTLS}, GapReason.TRANSIENT, id="another-authority"),
        pytest.param({"ca_file": "ca.pem"}, GapReason.TRANSIENT, id="no-certificate-of-ours"),
        pytest.param({"ca_file": "absent.pem"}, GapReason.UNREACHABLE, id="no-file"),
        pytest.param({"ca_file": "ca.key"}, GapReason.UNREACHABLE, id="not-a-certificate"),
        pytest.param(
            {"ca_file": "ca.pem", "cert_file": "client.pem", "key_file": "server.key"},
            GapReason.UNREACHABLE,
            id="not-its-key",
        ),
    ],
)
async def test_tls(settings: dict[str, Any], reason: GapReason | None, certificates: Path) -> None:
    async with listening("127.0.0.1", tls=serving_tls(certificates)) as port:
        server = PrometheusServer(url=f"https://127.0.0.1:{port}", **in_folder(settings, certificates))
        client = PrometheusClient(server, FakeClock())
        if reason is None:
            assert await client.query("up", AT) == Answer()
        else:
            assert (await reason_of(client))[0] == reason
        await client.close()


async def test_a_rotated_certificate_is_taken_up(certificates: Path, tmp_path: Path) -> None:
    authority = tmp_path / "ca.pem"
    shutil.copy(certificates / "other.pem", authority)
    async with listening("127.0.0.1", tls=serving_tls(certificates)) as port:
        settings = {"ca_file": str(authority), **in_folder(MTLS, certificates)}
        client = PrometheusClient(PrometheusServer(url=f"https://127.0.0.1:{port}", **settings), FakeClock())
        assert (await reason_of(client))[0] == GapReason.TRANSIENT
        shutil.copy(certificates / "ca.pem", authority)
        assert await client.query("up", AT) == Answer()
        await client.close()


def test_c144_nothing_foreign_shows_a_token(secrets: Path) -> None:
    """The exceptions underneath are shown in a traceback as well."""
    client = client_of(FakeServer(httpx.ConnectError("refused")), bearer_token_file=str(secrets / "two-lines"))
    with pytest.raises(SourceError) as error:
        asyncio.run(client.query("up", AT))
    assert "SECRET" not in "".join(traceback.format_exception(error.value))
