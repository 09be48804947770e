"""`autoscaler plan`: from a model and a card to an engine's start-up values, each with its reason."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import click
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoscaler.catalog import card, card_names, model, model_names
from autoscaler.catalog.configuration import BITS, QUANTIZATIONS
from autoscaler.core.kv import DTYPE_BYTES, GIB, KV_BYTES, ModelShape, Quantization
from autoscaler.core.planning import MIN_SLICE_REQUESTS, Ask, Card, Plan, PlanProblemError, plan
from autoscaler.policy_file import parse_duration
from autoscaler.sim.carries import carried_rps
from autoscaler.sim.profile import Profile
from autoscaler.sim.profiles import profile, profile_names

LENGTHS, OBJECTIVES = ("prompt", "output"), ("ttft", "itl")
DEFAULT_LENGTHS, DEFAULT_SLO = "prompt=1000,output=200", "ttft=2s,itl=100ms"
BAD_INPUT = 2
TIGHT = 8.0 * GIB
"""A cache below this is told to depend on what the arithmetic knows least."""


@click.command("plan", epilog=f"Shipped models: {', '.join(model_names())}.")
@click.argument("model_name", metavar="MODEL")
@click.option("--gpu", "gpu", required=True, help=f"The card: {', '.join(card_names())}.")
@click.option("--gpus", type=click.IntRange(min=1), help="Cards of a replica (tensor parallelism); else as few as pay.")
@click.option("--mig", help="Plan for this MIG profile of the card, such as 3g.40gb.")
@click.option("--memory", type=click.FloatRange(min=1.0), help="GiB of the card, in place of the table's.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float16"]), help="In place of the configuration's.")
@click.option("--quantization", type=click.Choice(QUANTIZATIONS), help="Of the weights; else the configuration's.")
@click.option("--kv-cache-dtype", type=click.Choice(list(KV_BYTES)), default="auto", show_default=True)
@click.option("--block-size", type=click.IntRange(min=1), help="Tokens a block; else 16, and 64 for MLA.")
@click.option("--gpu-memory-utilization", type=click.FloatRange(min=0.1, max=1.0), help="Else chosen.")
@click.option("--max-model-len", type=click.IntRange(min=1), help="Else the model's, or what fits.")
@click.option("--request", default=DEFAULT_LENGTHS, show_default=True, help="Tokens of a request, 90th percentile.")
@click.option("--context", "contexts", multiple=True, type=click.IntRange(min=1), help="Count sequences; repeatable.")
@click.option(
    "--profile", "profile_name", help=f"Time it by a profile: a file, or one of {', '.join(profile_names())}."
)
@click.option("--slo", help=f"With --profile: the objectives.  [default: {DEFAULT_SLO}]")
@click.option("--output", type=click.Choice(["table", "args", "json"]), default="table", show_default=True)
def command(  # one parameter an option
    model_name: str, gpu: str, contexts: tuple[int, ...], profile_name: str | None, **options: object
) -> int:
    """Plan start-up values for MODEL on a card: KV cache, parallelism, limits, and the MIG profile that fits.

    MODEL is a folder with a config.json, such a file, or the name of a shipped one. Nothing is downloaded and no GPU is
    needed: it is arithmetic. With --output args it prints the container's arguments, with their reasons as comments.
    """
    asked = _Asked(model_name=model_name, gpu=gpu, contexts=contexts, profile_name=profile_name, **options)  # type: ignore[arg-type]
    ask, pace = _ask(asked)
    try:
        made = plan(ask)
    except PlanProblemError as error:
        click.echo(f"{click.style('error', fg='red')}: {error}", err=True)
        return BAD_INPUT
    timed = None if pace is None else _time(made, ask, pace, _objectives(asked.slo))
    if asked.output == "json":
        click.echo(json.dumps(_plain(asked, made, timed), indent=2))
    elif asked.output == "args":
        click.echo(_container(asked, made), nl=False)
    else:
        _show(asked, made, timed)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The options, as they were given."""

    model_name: str
    gpu: str
    gpus: int | None
    mig: str | None
    memory: float | None
    dtype: str | None
    quantization: str | None
    kv_cache_dtype: str
    block_size: int | None
    gpu_memory_utilization: float | None
    max_model_len: int | None
    request: str
    contexts: tuple[int, ...]
    profile_name: str | None
    slo: str | None
    output: str


class _Timed(NamedTuple):
    """What one replica carries by a profile."""

    profile: str
    rps: float
    ttft_s: float
    itl_s: float


# --- from options to what is asked ----------------------------------------------------------------------------------


def _ask(asked: _Asked) -> tuple[Ask, Profile | None]:
    """Return what is asked for, and the profile to time it by. Raises ModelError and ProfileError."""
    chosen = card(asked.gpu)
    if asked.memory is not None:
        chosen = replace(chosen, memory_bytes=asked.memory * GIB, title=f"{chosen.title} ({asked.memory:g} GiB)")
    if asked.slo is not None and asked.profile_name is None:
        raise click.BadParameter("needs a --profile to be timed by", param_hint="--slo")
    lengths = {name: _count(value) for name, value in _pairs(asked.request, LENGTHS, "--request", DEFAULT_LENGTHS)}
    pace = None if asked.profile_name is None else _pace(asked, chosen)
    ask = Ask(
        shape=_stored(model(asked.model_name), asked),
        card=chosen,
        gpus=asked.gpus if pace is None else pace.gpus,
        mig=asked.mig,
        kv_dtype=asked.kv_cache_dtype,
        block_tokens=asked.block_size,
        utilization=asked.gpu_memory_utilization,
        max_model_len=asked.max_model_len,
        prompt=lengths["prompt"],
        output=lengths["output"],
        itl_s=None if pace is None else _objectives(asked.slo)["itl"],
        pace=pace,
    )
    return (replace(ask, contexts=tuple(sorted(asked.contexts))) if asked.contexts else ask), pace


def _pace(asked: _Asked, chosen: Card) -> Profile:
    """Return the profile. Raises click.BadParameter when it is of other cards than those planned for."""
    found = profile(asked.profile_name or "")
    if asked.mig is not None:
        raise click.BadParameter("a profile is of whole cards: leave out --mig", param_hint="--profile")
    if asked.gpus not in (None, found.gpus):
        raise click.BadParameter(f"{found.name} is of {found.gpus} cards, not {asked.gpus}", param_hint="--profile")
    if found.gpu and asked.memory is None and found.gpu != chosen.title:
        raise click.BadParameter(f"{found.name} is of {found.gpu}, not {chosen.title}", param_hint="--profile")
    return found


def _stored(shape: ModelShape, asked: _Asked) -> ModelShape:
    """Return the shape with the type and the quantization that were asked for."""
    if asked.dtype is not None and asked.dtype != shape.dtype:
        same = DTYPE_BYTES[asked.dtype] == DTYPE_BYTES[shape.dtype]
        shape = replace(shape, dtype=asked.dtype, checkpoint_bytes=shape.checkpoint_bytes if same else None)
    if asked.quantization is None or asked.quantization == shape.quantization.method:
        return shape
    if shape.quantization.method:
        stored = f"{shape.name} is stored in {shape.quantization.method} already"
        raise click.BadParameter(f"{stored}: leave the option out", param_hint="--quantization")
    quantization = Quantization(method=asked.quantization, bits=BITS[asked.quantization])
    return replace(shape, quantization=quantization, checkpoint_bytes=None)


def _pairs(text: str, known: tuple[str, ...], hint: str, example: str) -> Iterator[tuple[str, str]]:
    """Yield `name, value` of each known name. Raises click.BadParameter when one is missing, unknown or without one."""
    found = dict(part.partition("=")[::2] for part in text.split(","))
    if set(found) != set(known) or not all(found.values()):
        raise click.BadParameter(f"{text!r}: must be like {example}", param_hint=hint)
    yield from found.items()


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise click.BadParameter(f"{text!r}: must be a whole number of tokens, 1 or more", param_hint="--request")
    return int(text)


def _objectives(text: str | None) -> dict[str, float]:
    """Return the objectives [s] by name; the default ones when none were given."""
    text, seconds = text or DEFAULT_SLO, {}
    for name, value in _pairs(text, OBJECTIVES, "--slo", DEFAULT_SLO):
        try:
            seconds[name] = parse_duration(value)
        except ValueError as error:
            raise click.BadParameter(f"{value!r}: {error}", param_hint="--slo") from error
        if not seconds[name]:
            raise click.BadParameter(f"{text!r}: must be above 0", param_hint="--slo")
    return seconds


def _time(made: Plan, ask: Ask, pace: Profile, seconds: Mapping[str, float]) -> _Timed:
    """Return what a replica with the planned limits and cache carries, by simulating it."""
    planned = replace(
        pace,
        kv_tokens=made.kv_tokens,
        max_num_seqs=made.max_num_seqs,
        max_num_batched_tokens=max(made.max_num_batched_tokens, made.max_num_seqs),
    )
    rps = carried_rps(planned, ask.prompt, ask.output, seconds["ttft"], seconds["itl"])
    return _Timed(pace.name, rps, seconds["ttft"], seconds["itl"])


# --- arguments and numbers ------------------------------------------------------------------------------------------


def _arguments(asked: _Asked, made: Plan) -> dict[str, tuple[str, str]]:
    """Return the container's arguments by option, each with its reason."""
    why = made.reasons
    found = {
        "model": (made.shape.name, made.shape.source),
        "tensor-parallel-size": (str(made.gpus), why["tensor_parallel_size"]),
        "gpu-memory-utilization": (f"{made.gpu_memory_utilization:.2f}", why["gpu_memory_utilization"]),
        "max-model-len": (str(made.max_model_len), why["max_model_len"]),
        "max-num-seqs": (str(made.max_num_seqs), why["max_num_seqs"]),
        "max-num-batched-tokens": (str(made.max_num_batched_tokens), why["max_num_batched_tokens"]),
    }
    given = {"quantization": asked.quantization, "dtype": asked.dtype, "block-size": asked.block_size}
    if asked.kv_cache_dtype != "auto":
        given["kv-cache-dtype"] = asked.kv_cache_dtype
    asked_for = {name: (str(value), "as asked for") for name, value in given.items() if value is not None}
    if asked.quantization not in (None, "fp8"):
        asked_for["quantization"] = (asked.quantization or "", "the checkpoint must be stored so")
    return found | asked_for


def _resource(made: Plan) -> tuple[str, int]:
    """Return the Kubernetes resource of a replica, and how many of it."""
    return ("nvidia.com/gpu", made.gpus) if made.mig is None else (f"nvidia.com/mig-{made.mig.name}", 1)


def _container(asked: _Asked, made: Plan) -> str:
    """Return the part of a container's specification, as YAML with reasons."""
    lines = ["args:"]
    for name, (value, why) in _arguments(asked, made).items():
        text = yaml.safe_dump(f"--{name}={value}", width=1000).splitlines()[0]
        lines.append(f"- {text}  # {why}")
    resource, count = _resource(made)
    lines += ["resources:", f"  limits: {{{resource}: {count}}}"]
    return "\n".join(lines) + "\n"


def _plain(asked: _Asked, made: Plan, timed: _Timed | None) -> dict[str, object]:
    """Return everything as plain data; bytes and tokens are whole."""
    arguments = _arguments(asked, made)
    resource, count = _resource(made)
    return {
        "model": made.shape.name,
        "gpu": made.card.name,
        "mig": None if made.mig is None else made.mig.name,
        "parameters": made.shape.parameters,
        "quantization": made.shape.quantization.method or None,
        "perGpu": {
            "memoryBytes": int(made.device_bytes),
            "weightBytes": int(made.weight_bytes),
            "reserveBytes": int(made.reserve_bytes),
            "kvCacheBytes": int(made.kv_bytes),
        },
        "kvCache": {
            "bytesPerToken": int(made.kv_token_bytes),
            "blockSize": made.layout.block_tokens,
            "blocks": made.blocks,
            "tokens": made.kv_tokens,
            "requests": made.requests,
            "sequences": {str(held.context): held.sequences for held in made.held},
        },
        "values": {
            "tensor_parallel_size": made.gpus,
            "gpu_memory_utilization": made.gpu_memory_utilization,
            "max_model_len": made.max_model_len,
            "max_num_seqs": made.max_num_seqs,
            "max_num_batched_tokens": made.max_num_batched_tokens,
        },
        "reasons": made.reasons,
        "migFits": None if made.fits is None else {"profile": made.fits.slice.name, "requests": made.fits.requests},
        "carries": None if timed is None else timed._asdict(),
        "args": [f"--{name}={value}" for name, (value, _) in arguments.items()],
        "resources": {"limits": {resource: count}},
    }


# --- the table ------------------------------------------------------------------------------------------------------


def _show(asked: _Asked, made: Plan, timed: _Timed | None) -> None:
    """Print the table: wrapped and coloured on a terminal, a line a row on a pipe."""
    console = Console()
    where = made.card.title if made.mig is None else f"{made.card.title}, MIG {made.mig.name}"
    title, rows = f"{made.shape.name} on {made.gpus} x {where}", tuple(_rows(made, timed))
    if console.is_terminal:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        for name, value, why in rows:
            table.add_row(name, value, Text(why, style="dim"))
        console.print(title, style="bold", highlight=False)
        console.print(table, highlight=False)
    else:
        left, middle = (max(len(row[column]) for row in rows) for column in (0, 1))
        click.echo(title)
        for name, value, why in rows:
            click.echo(f"{name:<{left}}  {value:<{middle}}  {why}".rstrip())
    near = f"{asked.model_name.lower()}-{made.card.name}x{made.gpus}"
    if timed is None and made.mig is None and near in profile_names():
        click.echo(f"\nRequests/s, and limits by time: add --profile {near} --slo {DEFAULT_SLO}")


def _rows(made: Plan, timed: _Timed | None) -> Iterator[tuple[str, str, str]]:
    """Yield name, value and reason of each line."""
    gib = GIB
    stored = made.shape.quantization.method or made.shape.dtype
    how = "their files' size" if made.shape.checkpoint_bytes else f"{made.shape.parameters / 1e9:.2f} B parameters"
    each = f" / {made.gpus} cards" if made.gpus > 1 else ""
    yield "tensor parallelism", str(made.gpus), made.reasons["tensor_parallel_size"]
    yield "memory", f"{made.device_bytes / gib:.1f} GiB", "of each card, as CUDA reports it"
    yield "weights", f"{made.weight_bytes / gib:.1f} GiB", f"{how} in {stored}{each}"
    yield "engine's own", f"{made.reserve_bytes / gib:.1f} GiB", "activations at these limits, CUDA graphs, kernels"
    tight = f"; a release that takes 1 GiB more costs {gib / made.kv_bytes:.0%} of it" if made.kv_bytes < TIGHT else ""
    yield "KV cache", f"{made.kv_bytes / gib:.1f} GiB", f"what gpu_memory_utilization leaves{tight}"
    yield "KV bytes a token", f"{made.kv_token_bytes:,.0f}", _why_token(made)
    blocks = f"{made.layout.block_bytes / 2**20:.2f} MiB of {made.layout.block_tokens} tokens each"
    tables = len(made.layout.windows)
    yield "blocks", f"{made.blocks:,}", blocks + (f"; a request has {tables} tables of them" if tables > 1 else "")
    yield "KV tokens", f"{made.kv_tokens:,}", "kv_cache_size_tokens of cache_config_info"
    for held in made.held:
        yield f"sequences of {held.context:,}", f"{held.sequences:,}", ""
    for name in ("gpu_memory_utilization", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
        yield name, _value(made, name), made.reasons[name]
    if made.fits is not None:
        one, requests = made.fits.slice, made.fits.requests
        card_of = f"{one.per_card * requests:,} on a card of {one.per_card}, {made.requests:,} on a whole one"
        yield (
            "MIG profile that fits",
            one.name,
            f"{requests:,} requests of {made.request_tokens:,} tokens at once: {card_of}",
        )
    elif made.gpus == 1 and made.mig is None and made.card.slices:
        yield "MIG profile that fits", "none", f"none of several on a card holds {MIN_SLICE_REQUESTS} requests at once"
    if timed is not None:
        objectives = f"first token in {timed.ttft_s:g} s, {timed.itl_s * 1e3:g} ms a token"
        yield "carries", f"{timed.rps:.2f} requests/s", f"99 % with {objectives}; simulated by {timed.profile}"


def _value(made: Plan, name: str) -> str:
    value = getattr(made, name)
    return f"{value:.2f}" if isinstance(value, float) else f"{value:,}"


def _why_token(made: Plan) -> str:
    """Return the product behind the bytes of a token."""
    shape = made.shape
    if shape.latent is not None:
        element = made.kv_token_bytes / shape.layers / shape.latent
        return f"{shape.layers} layers x {shape.latent} latent x {element:g} bytes, on each card"
    element = made.kv_token_bytes / (2 * shape.layers * shape.kv_heads * shape.head_dim)
    text = f"2 x {shape.layers} layers x {shape.kv_heads} KV heads x {shape.head_dim} x {element:g} bytes"
    windows = [
        f"{span.layers} of the layers keep {span.window:,} tokens" for span in shape.spans if span.window is not None
    ]
    return "; ".join([text, *windows])
