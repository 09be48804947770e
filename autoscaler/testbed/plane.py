"""A real control plane on loopback: etcd, kube-apiserver, kube-controller-manager, kube-scheduler, and a fake kubelet.

TLS, RBAC, ServiceAccount tokens and an audit log are those of a cluster. There are no containers, no pod network, no
DNS, no Services that lead anywhere (kube-proxy), no cloud and no add-ons; admission is kube-apiserver's default.

Every part is a process of its own, so that a test may kill, freeze or restart one, and so that the pods go on while a
test waits for something else.
"""

import asyncio
import base64
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import aiohttp
import yaml

from autoscaler.testbed.api import Api, ApiError, Json

KUBERNETES = "1.36.3"
"""The version that `make cluster-tools` builds."""
NEEDED = ("openssl", "setpriv")
COMMANDS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")

START_LIMIT_S = 60.0
STOP_LIMIT_S = 20.0
POLL_S = 0.05
NODES = 2
GPUS = 8
HPA_SYNC_S = 5.0
"""How often an HPA acts; Kubernetes' default is 15 s."""
LOG_TAIL = 2000

AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        # Whoever changes a Deployment or its replicas, with what was asked and answered.
        {
            "level": "RequestResponse",
            "verbs": ["create", "update", "patch", "delete"],
            "resources": [{"group": "apps", "resources": ["deployments", "deployments/scale"]}],
        },
        # The control plane's own chatter.
        {"level": "None", "users": ["system:kube-controller-manager", "system:kube-scheduler", "system:apiserver"]},
        {"level": "None", "userGroups": ["system:nodes", "system:serviceaccounts:kube-system"]},
        {"level": "Request", "verbs": ["create", "update", "patch", "delete"]},
        {"level": "Metadata"},
    ],
}

ETCD = """
--name=test --data-dir={folder}/etcd --unsafe-no-fsync --log-level=warn
--listen-client-urls=http://127.0.0.1:{etcd} --advertise-client-urls=http://127.0.0.1:{etcd}
--listen-peer-urls=http://127.0.0.1:{peer} --initial-advertise-peer-urls=http://127.0.0.1:{peer}
--initial-cluster=test=http://127.0.0.1:{peer}
"""
# Without the advertised address and the reconciler "none", it looks for an interface beyond loopback. Without the grace
# period for watches, it ends a minute late while a client watches.
API_SERVER = """
--etcd-servers=http://127.0.0.1:{etcd} --secure-port={api} --bind-address=127.0.0.1
--advertise-address=127.0.0.1 --endpoint-reconciler-type=none --shutdown-watch-termination-grace-period=2s
--tls-cert-file={folder}/server.crt --tls-private-key-file={folder}/server.key --client-ca-file={folder}/ca.crt
--token-auth-file={folder}/tokens.csv --authorization-mode=Node,RBAC --profiling=false
--service-account-issuer=https://kubernetes.default.svc --service-cluster-ip-range=10.96.0.0/16
--service-account-key-file={folder}/accounts.pub --service-account-signing-key-file={folder}/accounts.key
--requestheader-client-ca-file={folder}/ca.crt --requestheader-allowed-names=front-proxy
--requestheader-username-headers=X-Remote-User --requestheader-group-headers=X-Remote-Group
--requestheader-extra-headers-prefix=X-Remote-Extra-
--proxy-client-cert-file={folder}/front-proxy.crt --proxy-client-key-file={folder}/front-proxy.key
--audit-policy-file={folder}/audit-policy.yaml --audit-log-path={folder}/audit.log
"""
# A lost node is seen after 12 s, not 50.
CONTROLLER_MANAGER = """
--kubeconfig={folder}/controller-manager.kubeconfig --authentication-kubeconfig={folder}/controller-manager.kubeconfig
--authorization-kubeconfig={folder}/controller-manager.kubeconfig --bind-address=127.0.0.1 --secure-port={manager}
--leader-elect=false --use-service-account-credentials --service-account-private-key-file={folder}/accounts.key
--root-ca-file={folder}/ca.crt --kube-api-qps=200 --kube-api-burst=400
--node-monitor-period=1s --node-monitor-grace-period=12s
--horizontal-pod-autoscaler-sync-period={hpa_sync_s:g}s --horizontal-pod-autoscaler-downscale-stabilization=10s
"""
SCHEDULER = """
--kubeconfig={folder}/scheduler.kubeconfig --authentication-kubeconfig={folder}/scheduler.kubeconfig
--authorization-kubeconfig={folder}/scheduler.kubeconfig --bind-address=127.0.0.1 --secure-port={scheduler}
--leader-elect=false --kube-api-qps=200 --kube-api-burst=400
"""
PORTS = ("etcd", "peer", "api", "manager", "scheduler", "engine")


class MissingToolsError(Exception):
    """Something that a control plane needs is not there; the message says what, and what to do."""


def find_tools() -> Path:
    """Return the folder with the commands: KUBEBUILDER_ASSETS, else what `build-tools` built last for this version.

    Raises MissingToolsError.
    """
    for name in NEEDED:
        if shutil.which(name) is None:
            raise MissingToolsError(f"{name} is not installed")
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if assets:
        absent = [name for name in COMMANDS if not os.access(Path(assets) / name, os.X_OK)]
        if absent:
            raise MissingToolsError(f"KUBEBUILDER_ASSETS is set, and there is no {', '.join(absent)} in it")
        return Path(assets)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-autoscaler"
    built = cache.glob(f"kubernetes-{KUBERNETES}-*")
    complete = [folder for folder in built if all(os.access(folder / name, os.X_OK) for name in COMMANDS)]
    if not complete:
        raise MissingToolsError("`make cluster-tools` has not built Kubernetes here")
    return max(complete, key=lambda folder: (folder / COMMANDS[-1]).stat().st_mtime)


class EndedError(RuntimeError):
    """A process has ended that nobody asked to end; the message has the end of its log."""


class Process:
    """One command, which ends with this process at the latest; its output goes to a file.

    Args:
        environ: its environment; None is this process's own.

    Attributes:
        log: that file. A restart goes on in it.
    """

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, environ: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._command = command
        self._environ = environ
        self._running: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process's id; 0 while there is none."""
        return self._running.pid if self._running is not None and self._running.poll() is None else 0

    def start(self) -> None:
        """Start it."""
        # Whatever ends the tests, ends it; a killed pytest must not leave a control plane behind.
        dying = ("setpriv", "--pdeathsig", "KILL", "--")
        with self.log.open("ab") as log:
            self._running = subprocess.Popen(
                (*dying, *self._command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environ,
                process_group=0,  # Ctrl-C is for the tests, which end it in order
            )

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it runs: SIGSTOP freezes it, SIGCONT lets it go on."""
        if self._running is not None and self._running.poll() is None:
            self._running.send_signal(number)

    def kill(self) -> None:
        """End it as a crash does."""
        self.send(signal.SIGKILL)
        if self._running is not None:
            self._running.wait()

    async def stop(self, limit_s: float = STOP_LIMIT_S) -> None:
        """Ask it to end, and wait for that; after the limit kill it."""
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        if self._running is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._running.wait, limit_s)
        self.kill()

    def check(self) -> None:
        """Raise EndedError when it has ended."""
        if not self.pid:
            raise EndedError(f"{self.name} ended:\n{self.tail()}")

    def tail(self) -> str:
        """Return the end of its log."""
        return self.log.read_text(errors="replace")[-LOG_TAIL:] if self.log.exists() else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEvent:
    """One request as the API server's audit log has it.

    Attributes:
        user: e.g. `system:serviceaccount:serving:autoscaler`.
        resource: with its subresource, as in a Role.
        credential: which token it was, e.g. `JTI=` and the token's id; "" for other credentials.
        answered_at: when the answer was complete, what it wrote included [epoch s, to the microsecond].
        code: the status of the answer.
        sent: the body of the request; None where the log leaves it out.
        answer: the object of the answer; None likewise.
        dry_run: nothing was written, as the request wished.
    """

    id: str
    at: str
    user: str
    credential: str
    agent: str
    verb: str
    group: str
    resource: str
    namespace: str
    name: str
    answered_at: float
    code: int
    sent: object
    answer: Json | None
    dry_run: bool

    @property
    def right(self) -> tuple[str, str, str]:
        """The right that it needs: API group, resource, verb."""
        return self.group, self.resource, self.verb

    @property
    def wrote(self) -> bool:
        """Whether it asked for a change and got it. A review is created, answered, and not kept."""
        asked = self.verb not in ("get", "list", "watch") and not self.resource.endswith("reviews")
        return asked and self.code < 300 and not self.dry_run


class Plane:
    """A control plane that runs.

    Attributes:
        folder: its files; gone when it ends.
        url: of the API server.
        kubeconfig: of an administrator.
        port: of every pod's HTTP server, at the pod's own address.
        tools: the folder with the commands.
    """

    def __init__(self, tools: Path, folder: Path, hpa_sync_s: float = HPA_SYNC_S) -> None:
        self.tools = tools
        self.folder = folder
        self._hpa_sync_s = hpa_sync_s
        self._ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        self.url = f"https://127.0.0.1:{self._ports['api']}"
        self.port = self._ports["engine"]
        _write_certificates(folder)
        (folder / "audit-policy.yaml").write_text(yaml.safe_dump(AUDIT_POLICY))
        tokens = {name: secrets.token_hex(16) for name in ("admin", "controller-manager", "scheduler")}
        self._admin_token = tokens["admin"]
        (folder / "tokens.csv").write_text(
            f"{tokens['admin']},admin,admin,system:masters\n"
            f"{tokens['controller-manager']},system:kube-controller-manager,controller-manager\n"
            f"{tokens['scheduler']},system:kube-scheduler,scheduler\n"
        )
        for name, token in tokens.items():
            self.kubeconfig_for(token, folder / f"{name}.kubeconfig")
        self.kubeconfig = folder / "admin.kubeconfig"
        self.etcd = self._process("etcd", ETCD)
        self.api_server = self._process("kube-apiserver", API_SERVER)
        self.controller_manager = self._process("kube-controller-manager", CONTROLLER_MANAGER)
        self.scheduler = self._process("kube-scheduler", SCHEDULER)
        self.kubelet = self.fake_kubelet("kubelet", [f"gpu-{number}" for number in range(NODES)], gpus=GPUS)

    def _process(self, name: str, flags: str) -> Process:
        words = flags.format(folder=self.folder, hpa_sync_s=self._hpa_sync_s, **self._ports).split()
        return Process(name, (str(self.tools / name), *words), self.folder)

    def fake_kubelet(
        self, name: str, nodes: Sequence[str], *, gpus: int, labels: Mapping[str, str] | None = None
    ) -> Process:
        """Return a fake kubelet for these nodes, not started. Its pods have a network of their own."""
        words = {
            "--kubeconfig": str(self.kubeconfig),
            "--nodes": ",".join(nodes),
            "--gpus": str(gpus),
            "--network": free_network(),
            "--port": str(self.port),
        }
        flat = [word for pair in words.items() for word in pair]
        flat += [word for key, value in (labels or {}).items() for word in ("--label", f"{key}={value}")]
        return Process(name, (sys.executable, "-m", "autoscaler.testbed.kubelet", *flat), self.folder)

    @property
    def processes(self) -> tuple[Process, ...]:
        """All its processes, in the order of their start. An API server whose etcd has gone does not end."""
        return self.etcd, self.api_server, self.controller_manager, self.scheduler, self.kubelet

    async def start(self) -> None:
        """Start everything, and return once pods can be made and scheduled."""
        await self.start_api()
        self.start_controllers()
        self.kubelet.start()
        await self.nodes_ready()

    async def start_api(self) -> None:
        """Start what keeps objects, and return once it does."""
        self.etcd.start()
        self.api_server.start()
        await self.ready()

    def start_controllers(self) -> None:
        """Start what acts on objects."""
        self.controller_manager.start()
        self.scheduler.start()

    async def nodes_ready(self) -> None:
        """Return once pods can be scheduled."""
        async with self.api() as api:
            await self.until(lambda: _has_ready_nodes(api), "nodes that are ready")

    async def stop(self) -> None:
        """End everything, in the order in which each can end at once."""
        for process in reversed(self.processes):
            await process.stop()

    async def mend(self) -> None:
        """Thaw what is frozen and start what has ended, as after a test that failed half way."""
        for process in self.processes:
            process.send(signal.SIGCONT)
            if not process.pid:
                process.start()
        await self.ready()

    async def renew(self) -> None:
        """Mend it, and start anew what would go on slowly after an outage; return once pods can be scheduled."""
        await self.mend()
        for process in (self.controller_manager, self.scheduler):
            process.kill()
            process.start()
        async with self.api() as api:
            await self.until(lambda: _has_ready_nodes(api), "nodes that are ready")

    async def ready(self) -> None:
        """Return once the API server is ready."""
        async with self.api() as api:
            await self.until(lambda: _is_ready(api), "an API server that is ready")

    async def until(self, true: Callable[[], Awaitable[bool]], what: str, limit_s: float = START_LIMIT_S) -> None:
        """Return once something is so. Raises EndedError when a process has ended, TimeoutError after the limit."""
        deadline = time.monotonic() + limit_s
        while not await true():
            for process in self.processes:
                if process.log.exists():
                    process.check()
            if time.monotonic() > deadline:
                said = "\n".join(f"--- {process.name}\n{process.tail()}" for process in self.processes)
                raise TimeoutError(f"no {what} within {limit_s:g} s\n{said}")
            await asyncio.sleep(POLL_S)

    # --- who may call it --------------------------------------------------------------------------------------------

    def api(self, token: str = "") -> Api:
        """Return the API as the bearer of the token sees it; an administrator without one."""
        return Api(self.url, (self.folder / "ca.crt").read_text(), token or self._admin_token)

    def kubeconfig_for(self, token: str, path: Path) -> Path:
        """Write a kubeconfig for the bearer of a token."""
        certificates = base64.b64encode((self.folder / "ca.crt").read_bytes()).decode()
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.url, "certificate-authority-data": certificates}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "users": [{"name": "test", "user": {"token": token}}],
        }
        path.write_text(yaml.safe_dump(content))
        path.chmod(0o600)
        return path

    def certificate_for(self, name: str) -> tuple[Path, Path]:
        """Return a server's certificate for that DNS name, signed by the plane's authority, and its key."""
        serves = ("-addext", f"subjectAltName=DNS:{name}", "-addext", "extendedKeyUsage=serverAuth")
        return _write_certificate(self.folder, name, *SIGNED, *LEAF, *serves)

    async def token_for(self, namespace: str, account: str, seconds: int = 3600) -> str:
        """Return a token of a ServiceAccount, as a pod would be given it."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}
        async with self.api() as api:
            answer = await api.request("POST", path, {**request, "spec": {"expirationSeconds": seconds}})
        return str(answer["status"]["token"])

    # --- what it saw ------------------------------------------------------------------------------------------------

    async def audit(self) -> list[AuditEvent]:
        """Return every request that was answered before this call, control plane and kubelets left out."""
        async with self.api() as api:
            _, marker = await api.exchange("GET", "/version")
        found: list[AuditEvent] = []

        async def is_there() -> bool:
            found[:] = self.audited()
            return any(event.id == marker for event in found)

        await self.until(is_there, "audit event of the last request")
        return [event for event in found if event.id != marker]

    def audited(self) -> list[AuditEvent]:
        """Return what of that is in the log by now: a request is there a moment after its answer."""
        text = (self.folder / "audit.log").read_text()
        # The last line may be half written.
        return [_audit_event(json.loads(line)) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def kubectl(self, *words: str) -> str:
        """Return what kubectl prints for an administrator. Raises CalledProcessError with what it complains of."""
        command = (str(self.tools / "kubectl"), "--kubeconfig", str(self.kubeconfig), *words)
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@asynccontextmanager
async def running_plane(tools: Path | None = None, hpa_sync_s: float = HPA_SYNC_S) -> AsyncIterator[Plane]:
    """Run a control plane while the block runs. Raises MissingToolsError."""
    async with new_plane(tools, hpa_sync_s) as plane:
        await plane.start()
        yield plane


@asynccontextmanager
async def new_plane(tools: Path | None = None, hpa_sync_s: float = HPA_SYNC_S) -> AsyncIterator[Plane]:
    """Give a control plane of which nothing runs yet; at its end the block ends what runs. Raises MissingToolsError."""
    with tempfile.TemporaryDirectory(prefix="control-plane-") as folder:
        plane = Plane(tools or find_tools(), Path(folder), hpa_sync_s)
        try:
            yield plane
        finally:
            await plane.stop()


def free_network() -> str:
    """Return a network of loopback for the pods of one kubelet; it is this process' for as long as that lives."""
    (number,) = free_ports(1)
    return f"127.{number >> 8}.{number & 255}.0/24"


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 that nobody listens on, and that no other test bed is given while this process lives.

    None of them is one that the kernel gives to outgoing connections: a server that starts again finds its port free.
    """
    found: list[int] = []
    while len(found) < count:
        port = secrets.choice(PORTS_TO_GIVE)
        if _is_free(port) and _take(port):
            found.append(port)
    return found


PORTS_TO_GIVE = range(10_240, 32_768)
"""Below where Linux begins to take the ports of outgoing connections from."""
_TAKEN: dict[int, socket.socket] = {}


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _take(port: int) -> bool:
    """Return whether a port is ours from now on. An abstract name of a socket has one owner, and goes with it."""
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0vllm-autoscaler/port/{port}")
    except OSError:
        name.close()
        return False
    _TAKEN[port] = name
    return True


async def _is_ready(api: Api) -> bool:
    try:
        await api.get("/readyz")
    except (ApiError, aiohttp.ClientError, TimeoutError):
        return False
    return True


async def _has_ready_nodes(api: Api) -> bool:
    nodes = await api.items("/api/v1/nodes")
    conditions = [item for node in nodes for item in node["status"].get("conditions", ()) if item["type"] == "Ready"]
    # A node stays tainted until the controller manager has seen it.
    tainted = any(node["spec"].get("taints") for node in nodes)
    return not tainted and sum(item["status"] == "True" for item in conditions) >= NODES


def _audit_event(line: Json) -> AuditEvent:
    what = line.get("objectRef") or {}
    sub = what.get("subresource")
    return AuditEvent(
        id=line["auditID"],
        at=line["requestReceivedTimestamp"],
        user=line["user"].get("username", ""),
        credential=next(iter(line["user"].get("extra", {}).get("authentication.kubernetes.io/credential-id", ())), ""),
        agent=line.get("userAgent", ""),
        verb=line["verb"],
        group=what.get("apiGroup", ""),
        resource=what.get("resource", "") + (f"/{sub}" if sub else ""),
        namespace=what.get("namespace", ""),
        name=what.get("name", ""),
        answered_at=datetime.fromisoformat(line["stageTimestamp"]).timestamp(),
        code=line.get("responseStatus", {}).get("code", 0),
        sent=line.get("requestObject"),
        answer=line.get("responseObject"),
        dry_run="dryRun=" in line["requestURI"],
    )


def _write_certificates(folder: Path) -> None:
    """Write a certificate authority, the server's and the aggregator's certificates, and the accounts' key pair."""
    names = "DNS:localhost,DNS:kubernetes.default.svc,IP:127.0.0.1,IP:10.96.0.1"
    signs = "keyUsage=critical,keyCertSign,cRLSign"
    ca = ("-addext", signs, "-addext", "basicConstraints=critical,CA:TRUE", "-addext", "subjectKeyIdentifier=hash")
    server = ("-addext", f"subjectAltName={names}", "-addext", "extendedKeyUsage=serverAuth")
    client = ("-addext", "extendedKeyUsage=clientAuth")
    _write_certificate(folder, "ca", *ca)
    _write_certificate(folder, "server", *SIGNED, *LEAF, *server)
    _write_certificate(folder, "front-proxy", *SIGNED, *LEAF, *client)
    _openssl(folder, "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-out", "accounts.key")
    _openssl(folder, "pkey", "-in", "accounts.key", "-pubout", "-out", "accounts.pub")


SIGNED = ("-CA", "ca.crt", "-CAkey", "ca.key", "-addext", "authorityKeyIdentifier=keyid")
LEAF = ("-addext", "keyUsage=critical,digitalSignature", "-addext", "basicConstraints=critical,CA:FALSE")


def _write_certificate(folder: Path, name: str, *more: str) -> tuple[Path, Path]:
    """Write a certificate and its key; return their paths."""
    new = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    _openssl(folder, *new, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.crt", *more)
    return folder / f"{name}.crt", folder / f"{name}.key"


def _openssl(folder: Path, *words: str) -> None:
    # Without the machine's configuration, whose extensions would come twice.
    subprocess.run(
        ("openssl", *words),
        cwd=folder,
        check=True,
        capture_output=True,
        env={**os.environ, "OPENSSL_CONF": str(_openssl_configuration(folder))},
    )


def _openssl_configuration(folder: Path) -> Path:
    path = folder / "openssl.cnf"
    path.write_text("[req]\ndistinguished_name = name\nprompt = no\n[name]\n")
    return path
