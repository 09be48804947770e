"""An engine's page: names, labels, buckets and values, read back by prometheus_client."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from autoscaler.sim.engine import Engine, Request
from autoscaler.sim.ledger import Ledger
from autoscaler.sim.pages import HISTOGRAMS, Page
from autoscaler.sim.profiles import profile
from autoscaler.sim.workload import Lengths, requests, steady

RECORDED = Path(__file__).parent.parent / "data" / "vllm" / "0.32.0" / "loaded.prom"
PROFILE = profile("llama-3.1-8b-l40sx1")
STARTED_AT = 1_768_348_802.25


@pytest.fixture(scope="module")
def engine() -> Engine:
    """An engine in the middle of heavy traffic, with preemptions, a queue and clients that gave up."""
    loaded = Engine(PROFILE, Ledger(), 20.0)
    for request in requests(np.random.default_rng(1), steady(9.0), Lengths(prompt=900.0, output=500.0), 240.0):
        loaded.submit(request)
    loaded.advance(240.0)
    return loaded


@pytest.fixture(scope="module")
def text(engine: Engine) -> str:
    return Page(PROFILE, STARTED_AT).render(engine)


def samples(page: str) -> dict[str, list[Sample]]:
    """Return the page's samples by name."""
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def value(page: dict[str, list[Sample]], name: str, **labels: str) -> float:
    """Return the one sample of that name with these labels."""
    (sample,) = (s for s in page[name] if all(s.labels.get(key) == wanted for key, wanted in labels.items()))
    return float(sample.value)


def test_scalars_read_back_as_the_engine_has_them(engine: Engine, text: str) -> None:
    page, tallies = samples(text), engine.tallies
    assert min(engine.running, engine.waiting, tallies.preemptions, tallies.aborted, tallies.finished) > 0
    assert value(page, "vllm:num_requests_running") == engine.running
    assert value(page, "vllm:num_requests_waiting") == engine.waiting
    assert value(page, "vllm:num_requests_waiting_by_reason", reason="capacity") == engine.waiting
    assert value(page, "vllm:num_requests_waiting_by_reason", reason="deferred") == 0
    assert value(page, "vllm:kv_cache_usage_perc") == engine.kv_usage
    assert value(page, "vllm:num_preemptions_total") == tallies.preemptions
    assert value(page, "vllm:prompt_tokens_total") == tallies.prompt_tokens
    assert value(page, "vllm:generation_tokens_total") == tallies.generation_tokens
    assert value(page, "vllm:request_success_total", finished_reason="length") == tallies.finished
    assert value(page, "vllm:request_success_total", finished_reason="abort") == tallies.aborted
    assert value(page, "process_start_time_seconds") == STARTED_AT


def test_cached_prompt_tokens_show_under_vllms_names() -> None:
    engine = Engine(PROFILE, Ledger())
    engine.submit(Request(0.0, 1000, 5, 0.5))
    engine.advance(10.0)
    page = samples(Page(PROFILE, STARTED_AT).render(engine))
    assert value(page, "vllm:prompt_tokens_total") == 1000
    assert value(page, "vllm:prompt_tokens_cached_total") == 496
    assert value(page, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 496
    assert value(page, "vllm:prompt_tokens_by_source_total", source="local_compute") == 504


@pytest.mark.parametrize(("attribute", "name"), [pytest.param(a, n, id=n) for a, n, _ in HISTOGRAMS])
def test_histograms_read_back_as_the_engine_has_them(engine: Engine, text: str, attribute: str, name: str) -> None:
    page, tally = samples(text), getattr(engine.tallies, attribute)
    buckets = page[f"vllm:{name}_bucket"]
    assert [float(sample.labels["le"]) for sample in buckets] == [*tally.bounds, float("inf")]
    assert [sample.value for sample in buckets] == tally.cumulative()
    assert value(page, f"vllm:{name}_count") == sum(tally.counts) > 0
    assert value(page, f"vllm:{name}_sum") == tally.sum


def test_cache_config_gives_the_capacity(text: str) -> None:
    (sample,) = samples(text)["vllm:cache_config_info"]
    assert sample.labels["block_size"] == "16"
    assert int(sample.labels["num_gpu_blocks"]) == PROFILE.kv_tokens // 16
    assert int(sample.labels["kv_cache_size_tokens"]) == int(sample.labels["num_gpu_blocks"]) * 16


def test_names_types_labels_and_buckets_are_those_of_a_real_server(text: str) -> None:
    """Every series of ours exists in a page recorded from vLLM 0.32, with the same labels."""
    ours, theirs = _series(text), _series(RECORDED.read_text())
    assert len(ours) > 200
    assert ours <= theirs
    types = re.compile(r"^# TYPE \S+ \S+$", re.MULTILINE)
    assert set(types.findall(text)) <= set(types.findall(RECORDED.read_text()))


def _series(page: str) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    """Return names with labels, the model's name apart. One entry per label name for the cache's settings.

    The lengths' buckets depend on the longest context, which the recorded tiny model has shorter.
    """
    found: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
    for sample in (sample for group in samples(page).values() for sample in group):
        labels = dict(sample.labels, model_name="")
        if sample.name == "vllm:cache_config_info":
            found |= {(sample.name, ((name, ""),)) for name in sample.labels}
            continue
        if re.fullmatch(r"vllm:request_(prompt|generation)_tokens_bucket", sample.name):
            labels["le"] = ""
        found.add((sample.name, tuple(sorted(labels.items()))))
    return found


def test_no_series_appears_twice(text: str) -> None:
    lines = Counter(line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#"))
    assert max(lines.values()) == 1
    assert text.endswith("\n")
