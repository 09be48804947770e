"""Real vLLM servers on loopback: CPU builds that `tests/vllm/install-engines` installs, with a tiny random model.

The plugin reaches them as it reaches a pod: `autoscaler plugin-install` into a directory that is on PYTHONPATH.
"""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from autoscaler.testbed.plane import free_ports

HERE = Path(__file__).parent
MODEL = "tiny"
TOKEN, API_KEY = "a-token-of-the-test", "a-key-of-the-test"
# On two cores that others use too, a server has taken three minutes.
START_LIMIT_S = 600.0
STOP_LIMIT_S = 30.0
POLL_S = 0.2
LIMITS = "/v1/autoscaler/limits"
# From here on a release loads endpoint plugins; before, the route is a middleware.
WITHOUT_ENDPOINTS = frozenset({"0.24.0"})
ASK_FOR_TILES = """
import ctypes

ctypes.CDLL(None).syscall(158, 0x1023, 18)  # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
"""
"""Linux lets a process use AMX tiles once it has asked. vLLM's attention uses them where there are any, and leaves the
asking to oneDNN's matrix products, which PyTorch's ordinary build does not call first. Without AMX nothing comes of it.
"""


class MissingEngineError(Exception):
    """A release is not installed, and what to do about it."""


def environment(release: str) -> Path:
    """Return the folder of a release. Raises: MissingEngineError."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "vllm-autoscaler" / f"vllm-{release}"
    pins, installed = HERE / "engines" / f"{release}.txt", folder / "installed.txt"
    if not installed.exists() or installed.read_bytes() != pins.read_bytes():
        raise MissingEngineError(f"vLLM {release} is not installed: make vllm-engines")
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How a server is started.

    Args:
        max_num_seqs, max_num_batched_tokens: the ceilings.
        blocks: of KV cache; a CPU's have 128 tokens. None leaves it to the engine: as many as a gigabyte holds.
        plugin: whether it is on PYTHONPATH, and named.
        arguments, variables: more of both.
        max_model_len: tokens of the longest request.
        pod: whose emptyDir it has. The same again is the same pod with a restarted container.
        host, port: where it listens, as on a pod's own address in 127.0.0.0/8; port 0 takes a free one.
    """

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    blocks: int | None = 64
    max_model_len: int = 2048
    plugin: bool = True
    arguments: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    pod: str = "pod"
    host: str = "127.0.0.1"
    port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What outlives a server: the model, the installed plugin, and the folders that stand for pods' emptyDirs."""

    release: str
    home: Path

    @property
    def model(self) -> Path:
        """Return the model's folder."""
        return self.home / "model"

    @property
    def plugins(self) -> Path:
        """Return the folder that the init container fills."""
        return self.home / "plugins"

    @property
    def site(self) -> Path:
        """Return the folder of what every process of a server does first."""
        return self.home / "site"

    def state(self, pod: str = "pod") -> Path:
        """Return the folder that the plugin writes to."""
        return self.home / "state" / pod


@asynccontextmanager
async def new_place(release: str) -> AsyncIterator[Place]:
    """Make the model and install the plugin. Raises: MissingEngineError."""
    python = environment(release) / "venv" / "bin" / "python"
    with tempfile.TemporaryDirectory(prefix="vllm-") as name:
        place = Place(release=release, home=Path(name))
        await run(str(python), str(HERE / "tiny_model.py"), str(place.model))
        command = "from autoscaler.cli import main; main()"
        await run(sys.executable, "-c", command, "plugin-install", str(place.plugins))
        place.site.mkdir()
        (place.site / "sitecustomize.py").write_text(ASK_FOR_TILES)
        yield place


async def run(*command: str) -> None:
    """Run a command to its end. Raises: RuntimeError, when it fails."""
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, errors = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{command[1]} ended with {process.returncode}: {errors.decode()}")


class VllmServer:
    """A server that is ready."""

    def __init__(self, release: str, client: httpx.AsyncClient, process: asyncio.subprocess.Process, log: Path) -> None:
        self.release = release
        self.client = client
        self.process = process
        self.log = log

    def last_words(self) -> str:
        """Return the end of its log."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-4000:]

    async def metrics(self) -> dict[str, float]:
        """Return the samples of its page without `_created`, by name; buckets have their bound behind it."""
        page = (await self.client.get("/metrics")).raise_for_status().text
        return {
            sample.name + sample.labels.get("le", ""): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name.startswith("vllm:")
        }

    async def running(self) -> int:
        """Return how many sequences run, by its page."""
        return int((await self.metrics())["vllm:num_requests_running"])

    async def limits(self) -> dict[str, Any]:
        """Return the plugin's state."""
        state: dict[str, Any] = (await self.client.get(LIMITS)).raise_for_status().json()
        return state

    async def put(self, generation: object, **limits: object) -> httpx.Response:
        """Return the answer to a target."""
        return await self.client.put(LIMITS, json={"generation": generation, "limits": limits})

    async def moved(self, **limits: int) -> dict[str, Any]:
        """Put the next target in force, and return its state."""
        generation = (await self.limits())["generation"] + 1
        answer = await self.put(generation, **limits)
        assert answer.status_code == httpx.codes.OK, answer.text
        state: dict[str, Any] = answer.json()
        assert state["applied_generation"] == generation
        return state


@asynccontextmanager
async def running_server(place: Place, start: Start | None = None) -> AsyncIterator[VllmServer]:
    """Start a server, wait until it is ready, and end it with all its processes."""
    start = start or Start()
    port = start.port or free_ports(1)[0]
    place.state(start.pod).mkdir(parents=True, exist_ok=True)
    log = place.home / f"server-{start.pod}.log"
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *command_of(place, start, port),
            env=variables_of(place, start),
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    headers = {"Authorization": f"Bearer {API_KEY}", "X-Autoscaler-Token": TOKEN}
    # vLLM closes a connection five seconds after its last answer, which a busy client may not have read yet.
    many = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    try:
        async with httpx.AsyncClient(
            base_url=f"http://{start.host}:{port}", headers=headers, limits=many, timeout=START_LIMIT_S, trust_env=False
        ) as client:
            server = VllmServer(place.release, client, process, log)
            await ready(server)
            yield server
    finally:
        await end(process)


def command_of(place: Place, start: Start, port: int) -> list[str]:
    """Return the command line of a server."""
    python = environment(place.release) / "venv" / "bin" / "python"
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--host", start.host, "--port", str(port), "--api-key", API_KEY]
    command += ["--model", str(place.model), "--served-model-name", MODEL]
    command += ["--max-model-len", str(start.max_model_len)]
    command += [
        "--max-num-seqs",
        str(start.max_num_seqs),
        "--max-num-batched-tokens",
        str(start.max_num_batched_tokens),
    ]
    if start.blocks is not None:
        command += ["--num-gpu-blocks-override", str(start.blocks)]
    command += ["--enforce-eager", *start.arguments]
    if start.plugin and place.release in WITHOUT_ENDPOINTS:
        command += ["--middleware", "vllm_autoscaler_plugin.LimitsMiddleware"]
    return command


def variables_of(place: Place, start: Start) -> dict[str, str]:
    """Return the environment of a server: nothing of the network, and its caches beside the release."""
    cache = environment(place.release) / "cache"
    variables = {
        "PATH": os.environ["PATH"],
        "HOME": str(place.home),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # One thread, wherever a core is free: several wait for each other at every turn, on cores that others use.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONPATH": str(place.site),
    }
    if start.plugin:
        variables |= {
            "PYTHONPATH": f"{place.plugins}{os.pathsep}{place.site}",
            "VLLM_PLUGINS": "autoscaler",
            "AUTOSCALER_PLUGIN_DIR": str(place.state(start.pod)),
            "AUTOSCALER_PLUGIN_TOKEN": TOKEN,
        }
    return variables | dict(start.variables)


async def ready(server: VllmServer) -> None:
    """Wait until a server answers, and warm it up. Raises: RuntimeError, with the end of its log, when it does not."""
    async with asyncio.timeout(START_LIMIT_S):
        while True:
            if server.process.returncode is not None:
                raise RuntimeError(f"vLLM ended with {server.process.returncode}: {server.last_words()}")
            try:
                if (await server.client.get("/health")).status_code == httpx.codes.OK:
                    break
            except httpx.TransportError:
                pass
            await asyncio.sleep(POLL_S)
    answer = await server.client.post("/v1/completions", json=completion(4, 2))
    if answer.status_code != httpx.codes.OK:
        raise RuntimeError(f"vLLM answered {answer.status_code}: {server.last_words()}")


async def end(process: asyncio.subprocess.Process) -> None:
    """End a server and its engine, which are one process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            await asyncio.wait_for(process.wait(), STOP_LIMIT_S)
        except TimeoutError:
            continue
    await process.wait()


def completion(prompt: int, output: int, *, kind: int = 0) -> dict[str, Any]:
    """Return a request for exactly so many tokens.

    Args:
        prompt, output: tokens.
        kind: prompts of different kinds share no prefix. The model has 1024 tokens, of which the first are special.
    """
    return {
        "model": MODEL,
        "prompt": [10 + (kind + place) % 1000 for place in range(prompt)],
        "max_tokens": output,
        "ignore_eos": True,
        "temperature": 0,
    }
