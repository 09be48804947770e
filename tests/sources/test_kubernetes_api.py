"""The API client: how it finds its server, logs in, waits when told to, and names what went wrong."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_asyncio.client import Configuration

from autoscaler.errors import TargetError
from autoscaler.sources import kubernetes_api
from autoscaler.sources.kubernetes_api import KubernetesApi
from tests.fake_api import FakeApi, FakeClock, Fault, Json, pod

DEPLOYMENT = "/apis/apps/v1/namespaces/serving/deployments/chat"
PODS = "/api/v1/namespaces/serving/pods"


@pytest.fixture
async def fake() -> AsyncIterator[FakeApi]:
    async with FakeApi().serve() as server:
        yield server


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def api(fake: FakeApi, clock: FakeClock) -> AsyncIterator[KubernetesApi]:
    api = KubernetesApi(Configuration(host=fake.url), clock, timeout_s=5.0)
    yield api
    await api.close()
    await api.close()


async def refused(api: KubernetesApi, path: str = DEPLOYMENT) -> TargetError:
    """Return the error of one read."""
    with pytest.raises(TargetError) as caught:
        await api.request("GET", path)
    return caught.value


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        pytest.param(Fault(status=400), "invalid", id="bad request"),
        pytest.param(Fault(status=403), "forbidden", id="forbidden"),
        pytest.param(Fault(status=404), "target_not_found", id="not found"),
        pytest.param(Fault(status=409), "conflict", id="conflict"),
        pytest.param(Fault(status=418), "bad_body", id="a status that Kubernetes does not use"),
        pytest.param(Fault(status=422), "conflict", id="failed test"),
        pytest.param(Fault(status=422, body={"details": {"causes": [{"field": "x"}]}}), "invalid", id="refused value"),
        pytest.param(Fault(status=500, body="<html>"), "unreachable", id="a gateway's page"),
        pytest.param(Fault(status=200, body="<html>"), "bad_body", id="a login page"),
        pytest.param(Fault(status=200, body="[]"), "bad_body", id="not an object"),
        pytest.param(Fault(status=200, body=""), "bad_body", id="empty"),
    ],
)
async def test_each_refusal_has_its_reason(fake: FakeApi, api: KubernetesApi, fault: Fault, reason: str) -> None:
    fake.faults = {"get deployments": [fault]}
    assert (await refused(api)).reason == reason
    assert (await api.request("GET", DEPLOYMENT))["kind"] == "Deployment"


async def test_the_details_are_the_servers_words_cut_short(fake: FakeApi, api: KubernetesApi) -> None:
    fake.faults = {"get deployments": [Fault(status=403, body={"kind": "Status", "message": "cannot get " * 60})]}
    error = await refused(api)
    assert error.detail.startswith(f"GET {DEPLOYMENT}: 403 cannot get")
    assert len(error.detail) == 200


async def test_a_frozen_server_is_unreachable(fake: FakeApi, clock: FakeClock) -> None:
    api = KubernetesApi(Configuration(host=fake.url), clock, timeout_s=0.2)
    fake.faults = {"get deployments": [Fault(hang=True)]}
    error = await refused(api)
    assert (error.reason, error.detail) == ("unreachable", f"GET {DEPLOYMENT}: no answer within 0.2 s")
    await api.close()


@pytest.mark.parametrize("host", ["http://127.0.0.1:1", "http://[::1", "kubernetes"])
async def test_no_server_is_unreachable(clock: FakeClock, host: str) -> None:
    api = KubernetesApi(Configuration(host=host), clock)
    assert (await refused(api)).reason == "unreachable"
    await api.close()


async def test_c092_throttled_with_retry_after(fake: FakeApi, api: KubernetesApi, clock: FakeClock) -> None:
    fake.faults = {"get deployments": [Fault(status=429, headers={"Retry-After": "7"})]}
    error = await refused(api)
    assert (error.reason, error.retry_after_s) == ("throttled", 7.0)
    clock.at += 6.9
    for path in (DEPLOYMENT, PODS):
        waiting = await refused(api, path)
        assert waiting.reason == "throttled"
        assert waiting.retry_after_s == pytest.approx(0.1)
    assert fake.verbs() == ["get deployments"]
    clock.at += 0.1
    await api.request("GET", DEPLOYMENT)
    assert fake.verbs() == ["get deployments"] * 2


async def test_c092_a_pause_holds_for_younger_clients_and_not_the_other_way_round(
    fake: FakeApi, api: KubernetesApi, clock: FakeClock
) -> None:
    younger = KubernetesApi(Configuration(host=fake.url), clock, elder=api)
    fake.faults = {"get deployments": [Fault(status=429, headers={"Retry-After": "7"})] * 2}
    assert (await refused(api)).reason == "throttled"
    assert (await refused(younger)).retry_after_s == 7.0
    clock.at += 7.0
    assert (await refused(younger)).retry_after_s == 7.0
    await api.request("GET", DEPLOYMENT)
    assert len(fake.requests) == 3
    await younger.close()


@pytest.mark.parametrize(
    ("status", "headers", "reason", "pause_s"),
    [
        pytest.param(429, {}, "throttled", 1.0, id="no wish"),
        pytest.param(429, {"Retry-After": "soon"}, "throttled", 1.0, id="not seconds"),
        pytest.param(429, {"Retry-After": "0"}, "throttled", 1.0, id="at once"),
        pytest.param(429, {"Retry-After": "86400"}, "throttled", 300.0, id="for a day"),
        pytest.param(503, {"Retry-After": "12"}, "unreachable", 12.0, id="unavailable for a while"),
        pytest.param(503, {}, "unreachable", None, id="unavailable"),
    ],
)
async def test_how_long_to_wait(
    fake: FakeApi, api: KubernetesApi, status: int, headers: dict[str, str], reason: str, pause_s: float | None
) -> None:
    fake.faults = {"get deployments": [Fault(status=status, headers=headers)]}
    error = await refused(api)
    assert (error.reason, error.retry_after_s) == (reason, pause_s)


async def test_c094_a_rotated_token_is_used_with_the_next_request(
    fake: FakeApi, clock: FakeClock, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("old\n")
    fake.tokens = {"old", "new"}
    api = KubernetesApi(Configuration(host=fake.url), clock, token_file=token)
    await api.request("GET", DEPLOYMENT)
    token.write_text("new\n")
    await api.request("GET", DEPLOYMENT)
    await api.close()
    assert [request.token for request in fake.requests] == ["old", "new"]


async def test_c094_a_refused_login_is_tried_once_more_and_then_later_and_later(
    fake: FakeApi, clock: FakeClock, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("stale")
    fake.tokens = {"good"}
    api = KubernetesApi(Configuration(host=fake.url), clock, token_file=token)
    pauses = []
    for _ in range(6):
        error = await refused(api)
        assert error.reason == "unauthorized"
        assert (await refused(api)).reason == "unauthorized"  # waits, without a request
        pauses.append(error.retry_after_s)
        clock.at += error.retry_after_s or 0.0
    assert pauses == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    assert fake.verbs() == ["get deployments"] * 12
    token.write_text("good")
    await api.request("GET", DEPLOYMENT)
    token.write_text("stale")
    assert (await refused(api)).retry_after_s == 5.0
    await api.close()


async def test_c094_another_token_ends_the_wait_for_everybody(fake: FakeApi, clock: FakeClock, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("stale")
    fake.tokens = {"good"}
    api = KubernetesApi(Configuration(host=fake.url), clock, token_file=token)
    for _ in range(3):
        clock.at += (await refused(api)).retry_after_s or 0.0
    token.write_text("wrong as well")
    assert (await refused(api)).retry_after_s == 40.0
    token.unlink()
    assert (await refused(api)).detail == "no request for another 40.0 s"
    token.write_text("good")
    await asyncio.gather(*(api.request("GET", path) for path in (DEPLOYMENT, PODS, DEPLOYMENT)))
    await api.close()


async def test_c092_another_token_does_not_end_a_servers_wish_for_patience(
    fake: FakeApi, clock: FakeClock, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("old")
    fake.faults = {"get deployments": [Fault(status=429, headers={"Retry-After": "7"})]}
    api = KubernetesApi(Configuration(host=fake.url), clock, token_file=token)
    await refused(api)
    token.write_text("new")
    assert (await refused(api)).reason == "throttled"
    await api.close()


async def test_targets_that_are_refused_at_the_same_time_count_once(fake: FakeApi, api: KubernetesApi) -> None:
    fake.tokens = set()
    errors = await asyncio.gather(*(refused(api) for _ in range(4)))
    assert {error.retry_after_s for error in errors} == {5.0}


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(None, id="missing"),
        pytest.param(b"", id="empty"),
        pytest.param(b"a\x00b", id="control character"),
        pytest.param(b"\xff\xfe", id="not text"),
    ],
)
async def test_a_token_file_without_a_token(
    fake: FakeApi, clock: FakeClock, tmp_path: Path, content: bytes | None
) -> None:
    token = tmp_path / "token"
    if content is not None:
        token.write_bytes(content)
    api = KubernetesApi(Configuration(host=fake.url), clock, token_file=token)
    assert (await refused(api)).reason == "unauthorized"
    assert fake.requests == []
    await api.close()


async def test_c141_one_client_for_all_requests(
    fake: FakeApi, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts: list[ssl.SSLContext] = []
    make: Callable[..., ssl.SSLContext] = ssl.create_default_context

    def counted(*args: Any, **kwargs: Any) -> ssl.SSLContext:
        contexts.append(make(*args, **kwargs))
        return contexts[-1]

    monkeypatch.setattr(ssl, "create_default_context", counted)
    api = KubernetesApi(Configuration(host=fake.url), clock, timeout_s=5.0)
    await api.request("GET", PODS)
    connections = fake.connections
    for _ in range(1_999):
        await api.request("GET", PODS)
    await api.close()
    assert len(fake.requests) == 2_000
    assert fake.connections == connections == 1
    assert len(contexts) == 1


async def test_a_kubeconfig_leads_to_its_server(fake: FakeApi, clock: FakeClock, tmp_path: Path) -> None:
    path = fake.write_kubeconfig(tmp_path / "config", {"token": "mine\n"})
    fake.tokens = {"mine"}
    for given, environ in ((str(path), {}), ("", {"KUBECONFIG": str(path)})):
        api = await KubernetesApi.connect(clock, kubeconfig=given, context="fake", environ=environ)
        assert (await api.request("GET", DEPLOYMENT))["kind"] == "Deployment"
        await api.close()


async def test_the_home_directory_has_the_last_word(
    fake: FakeApi, clock: FakeClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(TargetError, match=r"no kubeconfig at ~/\.kube/config"):
        await KubernetesApi.connect(clock, environ={})
    (tmp_path / ".kube").mkdir()
    fake.write_kubeconfig(tmp_path / ".kube" / "config")
    api = await KubernetesApi.connect(clock, environ={})
    assert (await api.request("GET", DEPLOYMENT))["kind"] == "Deployment"
    await api.close()


async def test_a_kubeconfigs_token_file_is_read_again_when_refused(
    fake: FakeApi, clock: FakeClock, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("old\n")
    path = fake.write_kubeconfig(tmp_path / "config", {"tokenFile": str(token)})
    api = await KubernetesApi.connect(clock, kubeconfig=str(path))
    token.write_text("new\n")
    fake.tokens = {"new"}
    await api.request("GET", DEPLOYMENT)
    assert [request.token for request in fake.requests] == ["old", "new"]
    path.unlink()
    fake.tokens = {"newer"}
    error = await refused(api)
    assert error.retry_after_s == 5.0
    assert len(fake.requests) == 3
    await api.close()


async def test_a_login_command_is_run_again_when_refused(fake: FakeApi, clock: FakeClock, tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    version = "client.authentication.k8s.io/v1"
    command = {"apiVersion": version, "command": "cat", "args": [str(answer)]}

    def give(token: str) -> None:
        answer.write_text(f'{{"apiVersion": "{version}", "kind": "ExecCredential", "status": {{"token": "{token}"}}}}')

    give("first")
    path = fake.write_kubeconfig(tmp_path / "config", {"exec": command})
    api = await KubernetesApi.connect(clock, kubeconfig=str(path))
    give("second")
    fake.tokens = {"second"}
    await api.request("GET", DEPLOYMENT)
    answer.write_text("cannot log in")
    fake.tokens = set()
    assert (await refused(api)).reason == "unauthorized"
    assert [request.token for request in fake.requests] == ["first", "second", "second"]
    await api.close()


def kubeconfig(**changes: Any) -> Json:
    cluster = {"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}
    context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
    user: Json = {"name": "u", "user": {}}
    return {"clusters": [cluster], "contexts": [context], "users": [user], "current-context": "x"} | changes


@pytest.mark.parametrize(
    ("content", "context", "message"),
    [
        pytest.param("a: [", "", "ParserError", id="no YAML"),
        pytest.param("- 1", "", "is not a kubeconfig", id="a list"),
        pytest.param({"clusters": "here"}, "", "is not a kubeconfig", id="wrong shape"),
        pytest.param(kubeconfig(users=[{"user": {}}]), "", "is not a kubeconfig", id="entry without a name"),
        pytest.param({}, "", "current-context", id="empty"),
        pytest.param(kubeconfig(), "y", "name y", id="no such context"),
        pytest.param(kubeconfig(clusters=[]), "", "name c", id="no such cluster"),
        pytest.param(kubeconfig(clusters=[{"name": "c", "cluster": {}}]), "", "has no server", id="empty cluster"),
        pytest.param(kubeconfig(clusters=[{"name": "c"}]), "", "cluster", id="no cluster"),
        pytest.param(
            kubeconfig(clusters=[{"name": "c", "cluster": {"tls-server-name": "h"}}]),
            "",
            "has no server",
            id="no server",
        ),
        pytest.param(kubeconfig(clusters=[{"name": "c", "cluster": "h"}]), "", "is not a kubeconfig", id="odd cluster"),
        pytest.param(
            kubeconfig(clusters=[{"name": "c", "cluster": {"server": "https://h", "certificate-authority-data": "A"}}]),
            "",
            "base64",
            id="certificate is not base64",
        ),
        pytest.param(
            kubeconfig(
                clusters=[{"name": "c", "cluster": {"server": "https://h", "certificate-authority-data": "QQ=="}}]
            ),
            "",
            "certificates of the API server",
            id="certificate is not one",
        ),
        pytest.param(
            kubeconfig(users=[{"name": "u", "user": {"exec": {"apiVersion": "v1", "command": "no-such-command"}}}]),
            "",
            "no-such-command",
            id="login command is not installed",
        ),
    ],
)
async def test_a_kubeconfig_that_cannot_be_used(
    clock: FakeClock, tmp_path: Path, content: Any, context: str, message: str
) -> None:
    path = tmp_path / "config"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    with pytest.raises(TargetError, match=message):
        await KubernetesApi.connect(clock, kubeconfig=str(path), context=context)


CERTIFICATE = next(path for path in (ssl.get_default_verify_paths().openssl_cafile,) if path)


async def test_a_pod_finds_its_server_by_its_service_account(clock: FakeClock, tmp_path: Path) -> None:
    environ = {"KUBERNETES_SERVICE_HOST": "::1", "KUBERNETES_SERVICE_PORT": "1"}
    with pytest.raises(TargetError, match="token file does not exist"):
        await KubernetesApi.connect(clock, environ=environ, account=tmp_path)
    (tmp_path / "token").write_text("mine\n")
    (tmp_path / "ca.crt").write_text("not a certificate")
    with pytest.raises(TargetError, match="certificates of the API server"):
        await KubernetesApi.connect(clock, environ=environ, account=tmp_path)
    (tmp_path / "ca.crt").unlink()
    (tmp_path / "ca.crt").symlink_to(CERTIFICATE)
    api = await KubernetesApi.connect(clock, environ=environ, account=tmp_path)
    error = await refused(api)
    assert error.reason == "unreachable"
    assert "::1" in error.detail
    await api.close()


# --- watching -------------------------------------------------------------------------------------------------------


def line(kind: str, item: object) -> str:
    """Return one line of a watch."""
    return json.dumps({"type": kind, "object": item}) + "\n"


ADDED = line("ADDED", {"metadata": {"name": "a", "resourceVersion": "7"}})
GONE = {"kind": "Status", "code": 410, "reason": "Expired", "metadata": {}}


async def told(api: KubernetesApi, seconds: int = 1) -> list[str]:
    """Return the types of what a watch tells until its end."""
    async with api.watch(PODS, "5", seconds) as events:
        return [str(one["type"]) async for one in events]


async def test_a_watch_tells_what_happens_and_ends_with_a_bookmark(fake: FakeApi, api: KubernetesApi) -> None:
    fake.pods = [pod("a")]
    assert await told(api) == ["ADDED", "BOOKMARK"]
    (request,) = fake.requests
    assert (request.verb, request.resource) == ("watch", "pods")
    assert request.query == {
        "watch": "true",
        "allowWatchBookmarks": "true",
        "resourceVersion": "5",
        "timeoutSeconds": "1",
    }


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        pytest.param(Fault(status=410, body=GONE), "expired", id="c096 as a status"),
        pytest.param(Fault(status=200, body=ADDED + line("ERROR", GONE)), "expired", id="c096 in the stream"),
        pytest.param(Fault(status=200, body=line("ERROR", {"code": 500})), "unreachable", id="an error of the server"),
        pytest.param(Fault(status=200, body=line("ERROR", {"code": "x"})), "bad_body", id="an odd error"),
        pytest.param(Fault(status=200, body=line("ERROR", None)), "bad_body", id="an empty error"),
        pytest.param(Fault(status=200, body=ADDED + "<html>\n"), "bad_body", id="a proxy's page"),
        pytest.param(Fault(status=200, body=ADDED + "[]\n"), "bad_body", id="not an object"),
        pytest.param(Fault(status=200, body=ADDED + ADDED[:20]), "bad_body", id="half a line"),
        pytest.param(Fault(status=200, body="x" * 2**23), "bad_body", id="a line without an end"),
        pytest.param(Fault(cut=True), "unreachable", id="cut at once"),
        pytest.param(Fault(cut=True, body=ADDED + ADDED[:20]), "unreachable", id="cut in a line"),
        pytest.param(Fault(status=403), "forbidden", id="no right"),
        pytest.param(Fault(status=429), "throttled", id="too many requests"),
    ],
)
async def test_how_a_watch_ends_badly(fake: FakeApi, api: KubernetesApi, fault: Fault, reason: str) -> None:
    fake.faults = {"watch pods": [fault]}
    with pytest.raises(TargetError) as caught:
        await told(api)
    assert caught.value.reason == reason


async def test_a_watch_that_goes_on_in_silence(
    fake: FakeApi, api: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_api, "WATCH_GRACE_S", 0.1)
    fake.faults = {"watch pods": [Fault(silent=True, body=ADDED)]}
    with pytest.raises(TargetError, match=r"watch of .*pods: no answer within 1.1 s") as caught:
        await told(api)
    assert caught.value.reason == "unreachable"


async def test_a_watch_that_is_not_opened_is_not_waited_for(fake: FakeApi, clock: FakeClock) -> None:
    fake.faults = {"watch pods": [Fault(hang=True)]}
    api = KubernetesApi(Configuration(host=fake.url), clock, timeout_s=0.2)
    with pytest.raises(TargetError, match=r"no answer within 0.2 s"):
        await told(api, 600)
    await api.close()


async def test_c094_a_watch_is_opened_with_the_token_of_now(fake: FakeApi, clock: FakeClock, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old")
    fake.tokens = {"new"}
    api = KubernetesApi(Configuration(host=fake.url), clock, token_file=token, timeout_s=5.0)
    with pytest.raises(TargetError) as caught:
        await told(api)
    assert (caught.value.reason, caught.value.retry_after_s) == ("unauthorized", 5.0)
    token.write_text("new")
    clock.at += 5.0
    assert await told(api) == ["BOOKMARK"]
    await api.close()
    assert [request.token for request in fake.requests] == ["old", "old", "new"]


async def test_a_mistake_of_whoever_listens_is_no_error_of_the_server(fake: FakeApi, api: KubernetesApi) -> None:
    async def stumble() -> None:
        async with api.watch(PODS, "5", 60) as events:
            async for _ in events:
                raise ValueError("mine")

    fake.pods = [pod("a")]
    with pytest.raises(ValueError, match="mine"):
        await stumble()
    assert (await api.request("GET", PODS))["items"]


async def test_writes_are_counted_for_those_who_ask(fake: FakeApi, api: KubernetesApi) -> None:
    assert api.writes(DEPLOYMENT) == 0
    await api.request("GET", DEPLOYMENT)
    assert api.writes(DEPLOYMENT) == 0
    for path in (f"{DEPLOYMENT}/scale", f"{DEPLOYMENT}-2/scale", PODS):
        with pytest.raises(TargetError):
            await api.request("PATCH", path, body=[{"op": "test", "path": "/nothing", "value": 1}])
    assert api.writes(DEPLOYMENT) == 1
    assert api.writes(f"{DEPLOYMENT}-2") == 0
