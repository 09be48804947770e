"""One engine's /metrics page, in the names, labels and buckets of vLLM 0.32 (text format 0.0.4)."""

from autoscaler.sim.engine import Engine
from autoscaler.sim.profile import Profile
from autoscaler.sim.tally import Tallies, Tally

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SCALARS: tuple[tuple[str, str, str, tuple[tuple[str, str, str], ...]], ...] = (
    (
        "gauge",
        "num_requests_running",
        "Number of requests in model execution batches.",
        (("", "", "%d.0"),),
    ),
    ("gauge", "num_requests_waiting", "Number of requests waiting to be processed.", (("", "", "%d.0"),)),
    (
        "gauge",
        "num_requests_waiting_by_reason",
        "Number of waiting requests by reason.",
        (("", ',reason="capacity"', "%d.0"), ("", ',reason="deferred"', "0.0")),
    ),
    (
        "gauge",
        "engine_sleep_state",
        "Engine sleep state; awake = 1 means engine is awake.",
        (
            ("", ',sleep_state="awake"', "1.0"),
            ("", ',sleep_state="weights_offloaded"', "0.0"),
            ("", ',sleep_state="discard_all"', "0.0"),
        ),
    ),
    ("gauge", "kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", (("", "", "%r"),)),
    ("counter", "num_preemptions_total", "Cumulative number of preemption from the engine.", (("", "", "%d.0"),)),
    ("counter", "prompt_tokens_total", "Number of prefill tokens processed.", (("", "", "%d.0"),)),
    (
        "counter",
        "prompt_tokens_by_source_total",
        "Number of prompt tokens by source.",
        (
            ("", ',source="local_compute"', "%d.0"),
            ("", ',source="local_cache_hit"', "%d.0"),
            ("", ',source="external_kv_transfer"', "0.0"),
        ),
    ),
    (
        "counter",
        "prompt_tokens_cached_total",
        "Number of cached prompt tokens (local + external).",
        (("", "", "%d.0"),),
    ),
    ("counter", "generation_tokens_total", "Number of generation tokens processed.", (("", "", "%d.0"),)),
    (
        "counter",
        "request_success_total",
        "Count of successfully processed requests.",
        (
            ('finished_reason="stop",', "", "0.0"),
            ('finished_reason="length",', "", "%d.0"),
            ('finished_reason="abort",', "", "%d.0"),
            ('finished_reason="error",', "", "0.0"),
            ('finished_reason="repetition",', "", "0.0"),
        ),
    ),
)
"""Type, name after `vllm:`, help, and per series the labels before and after the model's name and the value."""

HISTOGRAMS: tuple[tuple[str, str, str], ...] = (
    ("prompt_length", "request_prompt_tokens", "Number of prefill tokens processed."),
    ("generation_length", "request_generation_tokens", "Number of generation tokens processed."),
    ("iteration_tokens", "iteration_tokens_total", "Histogram of number of tokens per engine_step."),
    ("ttft", "time_to_first_token_seconds", "Histogram of time to first token in seconds."),
    ("itl", "inter_token_latency_seconds", "Histogram of inter-token latency in seconds."),
    (
        "tpot",
        "request_time_per_output_token_seconds",
        "Histogram of time_per_output_token_seconds per request.",
    ),
    ("e2e", "e2e_request_latency_seconds", "Histogram of e2e request latency in seconds."),
    ("queue", "request_queue_time_seconds", "Histogram of time spent in WAITING phase for request."),
    ("inference", "request_inference_time_seconds", "Histogram of time spent in RUNNING phase for request."),
    ("prefill", "request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request."),
    ("decode", "request_decode_time_seconds", "Histogram of time spent in DECODE phase for request."),
    (
        "request_preemptions",
        "request_num_preemptions",
        "Histogram of the number of times a request was preempted.",
    ),
)
"""Name in Tallies, name on the page after `vllm:`, help."""


class Page:
    """Renders one engine's page. All text is built once; a scrape only formats numbers.

    The families that the simulation has nothing to say about (parameters of requests, multi-modal and external caches,
    rooflines, LoRA, `_created` times, the Python runtime) are left out.

    Args:
        profile: the engine's.
        started_at: start of the engine's process, epoch seconds.
    """

    def __init__(self, profile: Profile, started_at: float) -> None:
        model, shapes = f'model_name="{profile.model}"', Tallies()
        self._template = "".join(
            (
                _family(
                    "process_start_time_seconds", "gauge", "Start time of the process since unix epoch in seconds."
                ),
                f"process_start_time_seconds {started_at!r}\n",
                *(_scalar(row, model) for row in SCALARS),
                *(_histogram(name, text, getattr(shapes, row).bounds, model) for row, name, text in HISTOGRAMS),
                _cache_config(profile),
            )
        )

    def render(self, engine: Engine) -> str:
        """Return the page as it reads now."""
        tallies = engine.tallies
        values: list[float] = [
            engine.running,
            engine.waiting,
            engine.waiting,
            engine.kv_usage,
            tallies.preemptions,
            tallies.prompt_tokens,
            tallies.prompt_tokens - tallies.cached_prompt_tokens,
            tallies.cached_prompt_tokens,
            tallies.cached_prompt_tokens,
            tallies.generation_tokens,
            tallies.finished,
            tallies.aborted,
        ]
        for attribute, _, _ in HISTOGRAMS:
            tally: Tally = getattr(tallies, attribute)
            counts = tally.cumulative()
            values += counts
            values.append(counts[-1])
            values.append(tally.sum)
        return self._template % tuple(values)


def _family(name: str, kind: str, text: str) -> str:
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"


def _scalar(row: tuple[str, str, str, tuple[tuple[str, str, str], ...]], model: str) -> str:
    """Return a gauge's or counter's lines; a series' labels stand on both sides of the model's name, in order."""
    kind, name, text, series = row
    lines = [
        f'vllm:{name}{{engine="0",{before}{model}{after}}} {placeholder}\n' for before, after, placeholder in series
    ]
    return _family(f"vllm:{name}", kind, text) + "".join(lines)


def _histogram(name: str, text: str, bounds: tuple[float, ...], model: str) -> str:
    lines = [f'vllm:{name}_bucket{{engine="0",le="{bound}",{model}}} %d.0\n' for bound in (*map(repr, bounds), "+Inf")]
    lines.append(f'vllm:{name}_count{{engine="0",{model}}} %d.0\n')
    lines.append(f'vllm:{name}_sum{{engine="0",{model}}} %r\n')
    return _family(f"vllm:{name}", "histogram", text) + "".join(lines)


def _cache_config(profile: Profile) -> str:
    labels = {
        "block_size": profile.block_size,
        "cache_dtype": "auto",
        "effective_attention_block_size": profile.block_size,
        "enable_prefix_caching": "False",
        "engine": "0",
        "gpu_memory_utilization": 0.9,
        "kv_cache_memory_bytes": "None",
        "kv_cache_size_tokens": profile.blocks * profile.block_size,
        "num_cpu_blocks": "None",
        "num_gpu_blocks": profile.blocks,
        "num_gpu_blocks_override": "None",
        "sliding_window": "None",
    }
    text = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return (
        _family("vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig")
        + f"vllm:cache_config_info{{{text}}} 1.0\n"
    )
