"""What vLLM's series mean: every release's names, odd values, odd pages."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from autoscaler.core.signals import COLUMN, ENGINE_COLUMNS, HISTOGRAMS
from autoscaler.core.types import WHOLE_PAGE, EngineKey, Engines, Gap, GapReason, Pod
from autoscaler.sources.exposition import Series, SeriesCache, make_page, parse_page
from autoscaler.sources.vllm import EngineBuilder, PodPage, build_engines, is_wanted

DATA = Path(__file__).parent.parent / "data" / "vllm"
PAGES = sorted(path for path in DATA.glob("*/*.prom") if path.stem != "disable_log_stats")
NAN = math.nan


def page(text: str | bytes, pod: str = "a", read_at: float = 100.0) -> PodPage:
    body = text if isinstance(text, bytes) else text.encode()
    return PodPage(
        pod=Pod(name=f"pod-{pod}", uid=f"uid-{pod}"), read_at=read_at, page=parse_page(body, SeriesCache(is_wanted))
    )


def recorded(name: str, pod: str = "a") -> PodPage:
    return page((DATA / f"{name}.prom").read_bytes(), pod)


def build(*texts: str, model_name: str = "") -> tuple[Engines, tuple[Gap, ...]]:
    """Build one pod a text, named a, b, c."""
    return build_engines([page(text, pod) for text, pod in zip(texts, "abc", strict=False)], model_name)


def column(engines: Engines, signal: str) -> list[float]:
    values: list[float] = engines.values[:, COLUMN[signal]].tolist()
    return values


def of(gaps: Sequence[Gap], signal: str) -> list[tuple[str, GapReason]]:
    return [(gap.pod, gap.reason) for gap in gaps if gap.signal == signal]


def line(name: str, value: object, **labels: str) -> str:
    shown = ",".join(f'{key}="{text}"' for key, text in labels.items())
    return f"{name}{{{shown}}} {value}\n"


# Recorded pages


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param(
            "0.32.0/saturated",
            {
                "read_at": 100.0,
                "started_at": 1796044534.92,
                "num_requests_running": 8.0,
                "num_requests_waiting": 24.0,
                "kv_cache_usage": 0.5079365079365079,
                "kv_capacity_tokens": 8192.0,
                "asleep": 0.0,
                "gpu_memory_utilization": 0.92,
                "num_preemptions": 0.0,
                "prompt_tokens": 1792.0,
                "cached_prompt_tokens": 0.0,
                "generation_tokens": 2802.0,
                "requests_finished": 3.0,
                "iterations": 603.0,
            },
            id="0.32",
        ),
        pytest.param(
            "0.32.0/kv_thrash",
            {"num_requests_running": 11.0, "num_requests_waiting": 34.0, "kv_capacity_tokens": 20480.0}
            | {"num_preemptions": 10.0, "requests_finished": 545.0},
            id="0.32-thrash",
        ),
        pytest.param(
            "0.32.0/api_server_count2",
            {"started_at": NAN, "num_requests_running": 8.0, "num_requests_waiting": 24.0, "iterations": 235.0},
            id="several-api-servers",
        ),
        pytest.param(
            "0.11.0/saturated",
            {"num_requests_running": 8.0, "num_requests_waiting": 52.0, "kv_capacity_tokens": 64 * 128.0}
            | {"gpu_memory_utilization": 0.9, "cached_prompt_tokens": 0.0, "asleep": 0.0},
            id="0.11",
        ),
        pytest.param(
            "0.8.5-v0-synthetic/saturated",
            {
                "kv_cache_usage": 0.93,
                "kv_capacity_tokens": 2048 * 16.0,
                "cached_prompt_tokens": NAN,
                "iterations": 50.0,
            },
            id="0.8-v0",
        ),
        pytest.param(
            "0.4.3-v0-synthetic/swapped",
            {"num_requests_running": 12.0, "num_requests_waiting": 40.0, "kv_cache_usage": 0.99, "iterations": NAN}
            | {"num_preemptions": 4.0, "requests_finished": 600.0, "generation_tokens": 600.0},
            id="0.4-v0",
        ),
    ],
)
def test_recorded_page(name: str, expected: dict[str, float]) -> None:
    engines, _ = build_engines([recorded(name)])
    assert engines.keys == (EngineKey("uid-a", "0"),)
    assert {signal: column(engines, signal)[0] for signal in expected} == pytest.approx(expected, nan_ok=True, rel=1e-9)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_recorded_histograms_equal_prometheus_client(path: Path) -> None:
    engines, _ = build_engines([page(path.read_bytes())])
    names = {
        "time_to_first_token_seconds": "ttft",
        "inter_token_latency_seconds": "itl",
        "e2e_request_latency_seconds": "e2e",
        "request_queue_time_seconds": "queue_time",
    }
    if path.parent.name in ("0.4.3-v0-synthetic", "0.8.5-v0-synthetic"):
        names["time_per_output_token_seconds"] = "itl"
    expected: dict[tuple[str, str, float], float] = {}
    for family in text_string_to_metric_families(path.read_text()):
        for sample in family.samples:
            signal = names.get(sample.name.removeprefix("vllm:").removesuffix("_bucket"))
            if signal is not None and sample.name.endswith("_bucket"):
                expected[signal, sample.labels.get("engine", "0"), float(sample.labels["le"])] = sample.value
    read = {
        (signal, engines.keys[row].engine, bound): count
        for signal, layouts in engines.histograms.items()
        for layout in layouts
        for row, counts in zip(layout.rows.tolist(), layout.counts.tolist(), strict=True)
        for bound, count in zip(layout.bounds, counts, strict=True)
    }
    assert read == expected


@pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_hole_in_a_recorded_page_has_its_gap(path: Path) -> None:
    engines, gaps = build_engines([page(path.read_bytes())])
    holes = {
        signal.name
        for index, signal in enumerate(ENGINE_COLUMNS)
        if np.isnan(engines.values[:, index]).any() and signal.name not in ("started_at", "gpu_memory_utilization")
    }
    holes |= {signal.name for signal in HISTOGRAMS if signal.name not in engines.histograms}
    assert {gap.signal for gap in gaps} == holes
    assert {gap.reason for gap in gaps} <= {GapReason.FAMILY_MISSING}
    if not path.parent.name.endswith("synthetic"):
        assert not holes


def test_data_parallel_ranks_are_rows_of_their_own() -> None:
    engines, gaps = build_engines([recorded("0.32.0/dp2_saturated")])
    assert engines.keys == (EngineKey("uid-a", "0"), EngineKey("uid-a", "1"))
    assert column(engines, "num_requests_running") == [4.0, 4.0]
    assert column(engines, "itl_sum") == pytest.approx([15.353, 15.0692], rel=1e-4)
    assert column(engines, "kv_capacity_tokens") == [8192.0, 8192.0]
    (ttft,) = engines.histograms["ttft"]
    assert ttft.rows.tolist() == [0, 1]
    assert ttft.counts.shape == (2, 23)
    assert gaps == ()


def test_pages_of_several_releases_and_pods_share_a_table() -> None:
    pages = [
        recorded("0.32.0/saturated", "c"),
        recorded("0.32.0/dp2_saturated", "a"),
        recorded("0.4.3-v0-synthetic/saturated", "b"),
        recorded("0.32.0/loaded", "d"),
    ]
    engines, gaps = build_engines(pages)
    assert engines.keys == tuple(EngineKey(f"uid-{pod}", engine) for pod, engine in ("a0", "a1", "b0", "c0", "d0"))
    assert column(engines, "num_requests_running") == [4.0, 4.0, 16.0, 8.0, 3.0]
    layouts = {len(layout.bounds): layout.rows.tolist() for layout in engines.histograms["ttft"]}
    assert layouts == {23: [0, 1, 3, 4], 17: [2]}
    (newest,) = [layout for layout in engines.histograms["ttft"] if len(layout.bounds) == 23]
    assert newest.counts[:, -1].tolist() == [4.0, 4.0, 11.0, 3.0]
    assert {gap.pod for gap in gaps} == {"pod-b"}


def test_equal_pods_make_one_block_a_histogram() -> None:
    engines, _ = build_engines([recorded("0.32.0/saturated", pod) for pod in "dbcae"])
    assert {name: len(layouts) for name, layouts in engines.histograms.items()} == {
        signal.name: 1 for signal in HISTOGRAMS
    }
    (ttft,) = engines.histograms["ttft"]
    assert ttft.rows.tolist() == [0, 1, 2, 3, 4]
    assert ttft.bounds[-1] == math.inf
    assert (np.diff(ttft.counts, axis=1) >= 0).all()


def test_no_pages_is_an_empty_table() -> None:
    engines, gaps = build_engines([])
    assert (engines.keys, engines.values.shape, engines.histograms, gaps) == ((), (0, len(ENGINE_COLUMNS)), {}, ())


def test_keys_stay_the_same_object_while_the_engines_do() -> None:
    builder = EngineBuilder()
    first, _ = builder.build([recorded("0.32.0/loaded", "a"), recorded("0.32.0/loaded", "b")])
    again, _ = builder.build([recorded("0.32.0/saturated", "b"), recorded("0.32.0/idle", "a")])
    other, _ = builder.build([recorded("0.32.0/loaded", "a"), recorded("0.32.0/loaded", "c")])
    assert again.keys is first.keys
    assert again.values is not first.values
    assert other.keys == (EngineKey("uid-a", "0"), EngineKey("uid-c", "0"))


def test_more_layouts_than_are_remembered() -> None:
    builder = EngineBuilder()
    texts = [line("vllm:num_requests_running", number, model_name=f"m{number}") for number in range(70)]
    for _ in range(2):
        engines, _ = builder.build([page(text, f"{number:02}") for number, text in enumerate(texts)])
        assert column(engines, "num_requests_running") == list(range(70))


# Names


def test_c019_kv_gauge_renamed_old_and_new_coexist() -> None:
    pages = [
        page(line("vllm:gpu_cache_usage_perc", 0.80, model_name="m"), "a"),
        page(line("vllm:kv_cache_usage_perc", 0.40, engine="0", model_name="m"), "b"),
        page(
            line("vllm:gpu_cache_usage_perc", 0.60, engine="0", model_name="m")
            + line("vllm:kv_cache_usage_perc", 0.60, engine="0", model_name="m"),
            "c",
        ),
    ]
    builder = EngineBuilder()
    engines, gaps = builder.build(pages)
    assert column(engines, "kv_cache_usage") == [0.80, 0.40, 0.60]
    assert of(gaps, "kv_cache_usage") == []
    families = builder.families(pages)
    assert families["kv_cache_usage", "vllm:kv_cache_usage_perc"] == 2
    assert families["kv_cache_usage", "vllm:gpu_cache_usage_perc"] == 1


@pytest.mark.parametrize("order", [1, -1], ids=["old-first", "new-first"])
@pytest.mark.parametrize(
    ("signal", "lines", "expected"),
    [
        pytest.param(
            "kv_cache_usage",
            [line("vllm:gpu_cache_usage_perc", 0.1), line("vllm:kv_cache_usage_perc", 0.2)],
            0.2,
            id="kv",
        ),
        pytest.param(
            "num_requests_waiting",
            [
                line("vllm:num_requests_waiting", 9),
                line("vllm:num_requests_waiting_by_reason", 4, reason="capacity"),
                line("vllm:num_requests_waiting_by_reason", 5, reason="deferred"),
            ],
            4.0,
            id="waiting-for-capacity",
        ),
        pytest.param(
            "num_requests_waiting",
            [line("vllm:num_requests_waiting", 9), line("vllm:num_requests_waiting_by_reason", 5, reason="deferred")],
            9.0,
            id="waiting-without-capacity-reason",
        ),
        pytest.param(
            "cached_prompt_tokens",
            [
                line("vllm:gpu_prefix_cache_hits_total", 1),
                line("vllm:prefix_cache_hits_total", 2),
                line("vllm:prompt_tokens_cached_total", 3),
            ],
            3.0,
            id="cached",
        ),
        pytest.param(
            "cached_prompt_tokens",
            [line("vllm:gpu_prefix_cache_hits_total", 1), line("vllm:prefix_cache_hits", 2)],
            2.0,
            id="prefix-hits-without-total",
        ),
        pytest.param("cached_prompt_tokens", [line("vllm:gpu_prefix_cache_hits_total", 1)], 1.0, id="gpu-prefix-hits"),
        pytest.param(
            "itl_sum",
            [
                line("vllm:time_per_output_token_seconds_sum", 1),
                line("vllm:inter_token_latency_seconds_sum", 2),
                line("vllm:request_time_per_output_token_seconds_sum", 3),
            ],
            2.0,
            id="itl",
        ),
        pytest.param(
            "requests_finished",
            [
                line("vllm:request_success_total", 3, finished_reason="stop"),
                line("vllm:request_success_total", 4, finished_reason="abort"),
                line("vllm:request_success_created", 1.7e9, finished_reason="stop"),
            ],
            7.0,
            id="finished-is-a-sum",
        ),
        pytest.param("iterations", [line("vllm:iteration_tokens_total_count", 5)], 5.0, id="iterations"),
    ],
)
def test_first_name_present_wins(signal: str, lines: list[str], expected: float, order: int) -> None:
    engines, _ = build("".join(lines[::order]))
    assert column(engines, signal) == [expected]


@pytest.mark.parametrize("prefix", ["vllm:", "vllm_", "ray_vllm_", "ray_vllm:"])
def test_prefix_as_collectors_spell_it(prefix: str) -> None:
    body = (DATA / "0.32.0" / "saturated.prom").read_text().replace("vllm:", prefix)
    engines, gaps = build(body)
    expected, _ = build_engines([recorded("0.32.0/saturated")])
    assert np.array_equal(engines.values, expected.values)
    assert engines.histograms.keys() == expected.histograms.keys()
    assert gaps == ()


@pytest.mark.parametrize(
    ("labels", "capacity", "utilization"),
    [
        pytest.param(
            {"kv_cache_size_tokens": "5000", "num_gpu_blocks": "10", "block_size": "16"}, 5000.0, NAN, id="label"
        ),
        pytest.param(
            {"num_gpu_blocks": "10", "block_size": "16", "gpu_memory_utilization": "0.9"}, 160.0, 0.9, id="blocks"
        ),
        pytest.param(
            {"kv_cache_size_tokens": "None", "num_gpu_blocks": "10", "block_size": "16"}, 160.0, NAN, id="none"
        ),
        pytest.param({"num_gpu_blocks": "None", "block_size": "16"}, NAN, NAN, id="not-allocated-yet"),
        pytest.param({"num_gpu_blocks": "0", "block_size": "16"}, NAN, NAN, id="zero"),
        pytest.param(
            {"num_gpu_blocks": "-1", "block_size": "16", "gpu_memory_utilization": "90"}, NAN, NAN, id="absurd"
        ),
    ],
)
def test_capacity_from_the_configuration(labels: dict[str, str], capacity: float, utilization: float) -> None:
    engines, gaps = build(line("vllm:num_requests_running", 1) + line("vllm:cache_config_info", 1, **labels))
    assert column(engines, "kv_capacity_tokens") == pytest.approx([capacity], nan_ok=True)
    assert column(engines, "gpu_memory_utilization") == pytest.approx([utilization], nan_ok=True)
    assert bool(of(gaps, "kv_capacity_tokens")) == math.isnan(capacity)


# Engines and models


def test_c021_data_parallel_pod_one_series_per_engine() -> None:
    text = "".join(
        line(f"vllm:{name}", value, engine=engine, model_name="m")
        for name, values in (
            ("num_requests_waiting", (12, 3)),
            ("num_requests_running", (16, 9)),
            ("kv_cache_usage_perc", (0.95, 0.35)),
        )
        for engine, value in zip("01", values, strict=True)
    )
    engines, _ = build(text)
    assert engines.keys == (EngineKey("uid-a", "0"), EngineKey("uid-a", "1"))
    assert sum(column(engines, "num_requests_waiting")) == 15.0
    assert sum(column(engines, "num_requests_running")) == 25.0
    assert np.mean(column(engines, "kv_cache_usage")) == pytest.approx(0.65)
    assert len({key.pod_uid for key in engines.keys}) == 1


def test_c026_filter_that_matches_nothing_names_the_models_seen() -> None:
    engines, gaps = build(line("vllm:num_requests_waiting", 40, engine="0", model_name="base"), model_name="lora-a")
    assert engines.keys == ()
    (gap,) = gaps
    assert (gap.signal, gap.reason, gap.pod) == (WHOLE_PAGE, GapReason.FILTER_MATCHED_NOTHING, "pod-a")
    assert "base" in gap.detail


def test_filter_keeps_one_model_and_what_has_no_model() -> None:
    text = (
        line("vllm:num_requests_waiting", 1, engine="0", model_name="a")
        + line("vllm:num_requests_waiting", 2, engine="0", model_name="b")
        + line("vllm:cache_config_info", 1, engine="0", kv_cache_size_tokens="7")
        + "process_start_time_seconds 5\n"
    )
    engines, _ = build(text, model_name="b")
    assert engines.keys == (EngineKey("uid-a", "0"),)
    assert column(engines, "num_requests_waiting") == [2.0]
    assert column(engines, "kv_capacity_tokens") == [7.0]
    assert column(engines, "started_at") == [5.0]


def test_two_models_behind_one_engine_label_are_two_engines() -> None:
    engines, _ = build(
        line("vllm:num_requests_waiting", 1, engine="0", model_name="a")
        + line("vllm:num_requests_waiting", 2, engine="0", model_name="b")
    )
    assert engines.keys == (EngineKey("uid-a", "0/a"), EngineKey("uid-a", "0/b"))
    assert column(engines, "num_requests_waiting") == [1.0, 2.0]


@pytest.mark.parametrize(
    ("states", "asleep"),
    [
        pytest.param({"awake": 1, "weights_offloaded": 0, "discard_all": 0}, 0.0, id="awake"),
        pytest.param({"awake": 0, "weights_offloaded": 1, "discard_all": 0}, 1.0, id="offloaded"),
        pytest.param({"awake": 0, "weights_offloaded": 0, "discard_all": 0}, 1.0, id="level-0"),
        pytest.param({}, 0.0, id="no-sleep-mode"),
    ],
)
def test_c038_sleeping_engine_says_so(states: dict[str, int], asleep: float) -> None:
    engines, gaps = build(
        line("vllm:num_requests_waiting", 0, engine="0", model_name="m")
        + "".join(
            line("vllm:engine_sleep_state", value, engine="0", model_name="m", sleep_state=state)
            for state, value in states.items()
        )
    )
    assert column(engines, "asleep") == [asleep]
    assert of(gaps, "asleep") == []


# Pages that say nothing


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param('python_gc_objects_collected_total{generation="0"} 5\n', id="foreign"),
        pytest.param("process_start_time_seconds 1.7e9\n", id="process-only"),
        pytest.param(line("vllm:cache_config_info", 1, num_gpu_blocks="5", block_size="16"), id="configuration-only"),
        pytest.param((DATA / "0.32.0" / "disable_log_stats.prom").read_text(), id="disable-log-stats"),
    ],
)
def test_c022_page_without_vllm_families_is_no_row(text: str) -> None:
    builder = EngineBuilder()
    for _ in range(3):
        engines, gaps = builder.build([page(text)])
        assert engines.keys == ()
        assert [(gap.signal, gap.reason, gap.pod) for gap in gaps] == [(WHOLE_PAGE, GapReason.NO_FAMILIES, "pod-a")]


def test_c024_frozen_page_carries_what_shows_it() -> None:
    text = (
        line("vllm:kv_cache_usage_perc", 0.99)
        + line("vllm:num_requests_running", 0)
        + line("vllm:num_requests_waiting", 0)
        + line("vllm:generation_tokens_total", 812345)
        + line("vllm:prompt_tokens_total", 99)
    )
    engines, _ = build(text)
    expected = {
        "kv_cache_usage": 0.99,
        "num_requests_running": 0.0,
        "num_requests_waiting": 0.0,
        "generation_tokens": 812345.0,
        "prompt_tokens": 99.0,
        "read_at": 100.0,
    }
    assert {signal: column(engines, signal)[0] for signal in expected} == expected


# Values


def test_c060_percent_in_the_name_ratio_in_the_value() -> None:
    engines, gaps = build(line("vllm:kv_cache_usage_perc", 0.47), line("vllm:kv_cache_usage_perc", 47.0))
    assert column(engines, "kv_cache_usage") == pytest.approx([0.47, NAN], nan_ok=True)
    (gap,) = [gap for gap in gaps if gap.signal == "kv_cache_usage"]
    assert (gap.pod, gap.reason) == ("pod-b", GapReason.OUT_OF_RANGE)
    assert "ratio" in gap.detail
    assert "percentage" in gap.detail


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param("1.0000000002", 1.0, id="noise-above"),
        pytest.param("1.0009", 1.0, id="tolerated-above"),
        pytest.param("1.02", NAN, id="above"),
        pytest.param("-0.0", 0.0, id="minus-zero"),
        pytest.param("-1e-12", 0.0, id="noise-below"),
        pytest.param("-0.3875", NAN, id="below"),
        pytest.param("NaN", NAN, id="nan"),
        pytest.param("+Inf", NAN, id="inf"),
    ],
)
def test_c061_kv_gauge_slightly_out_of_range(value: str, expected: float) -> None:
    engines, gaps = build(line("vllm:kv_cache_usage_perc", value))
    (read,) = column(engines, "kv_cache_usage")
    assert read == pytest.approx(expected, nan_ok=True, abs=0)
    assert math.copysign(1.0, read) == 1.0
    assert bool(of(gaps, "kv_cache_usage")) == math.isnan(expected)


def test_one_bad_value_does_not_void_the_page() -> None:
    text = line("vllm:num_requests_running", "NaN") + line("vllm:num_requests_waiting", 3)
    engines, gaps = build(text + line("vllm:generation_tokens_total", -5) + line("vllm:prompt_tokens_total", "oops"))
    assert column(engines, "num_requests_waiting") == [3.0]
    assert of(gaps, "num_requests_running") == [("pod-a", GapReason.NON_FINITE)]
    assert of(gaps, "generation_tokens") == [("pod-a", GapReason.OUT_OF_RANGE)]
    assert of(gaps, "prompt_tokens") == [
        ("pod-a", GapReason.FAMILY_MISSING),
        ("pod-a", GapReason.PARSE_ERROR),
    ]


def test_bad_lines_name_their_signal() -> None:
    text = line("vllm:num_requests_running", 1) + (
        "process_start_time_seconds x\nvllm:cache_config_info{ 1\nvllm:time_to_first_token_seconds_bucket{ 1\n"
    )
    _, gaps = build(text)
    broken = {gap.signal for gap in gaps if gap.reason is GapReason.PARSE_ERROR}
    assert broken == {"started_at", "kv_capacity_tokens", "ttft"}


def test_gap_of_one_of_several_engines_names_it() -> None:
    _, gaps = build(
        line("vllm:kv_cache_usage_perc", 0.5, engine="0")
        + line("vllm:kv_cache_usage_perc", 50, engine="1")
        + line("vllm:num_requests_running", 1, engine="0")
    )
    assert [gap.detail.split(":")[0] for gap in gaps if gap.signal == "kv_cache_usage"] == ["engine 1"]
    assert [gap.detail for gap in gaps if gap.signal == "num_requests_running"] == ["engine 1"]


@pytest.mark.parametrize(
    ("signal", "text", "expected"),
    [
        pytest.param("num_requests_running", line("vllm:num_requests_running", 4), 4.0, id="equal"),
        pytest.param("num_requests_running", line("vllm:num_requests_running", 5), 5.0, id="larger"),
        pytest.param("num_requests_running", line("vllm:num_requests_running", 3), 4.0, id="smaller"),
        pytest.param("num_requests_running", line("vllm:num_requests_running", 4, job="b"), 4.0, id="other-label"),
        pytest.param("num_requests_running", line("vllm:num_requests_running", "NaN"), 4.0, id="nan"),
    ],
)
def test_repeated_series_count_once_and_the_larger_value_stays(signal: str, text: str, expected: float) -> None:
    engines, _ = build(line("vllm:num_requests_running", 4) + text)
    assert column(engines, signal) == [expected]


# Histograms


def buckets(*pairs: tuple[str, object]) -> str:
    return "".join(line("vllm:time_to_first_token_seconds_bucket", count, le=bound) for bound, count in pairs)


def test_c034_bucket_bounds_are_numbers() -> None:
    text = buckets(("1", 40), ("1.0", 42), ("1e+00", 41), ("2.5", 50), ("+Inf", 50))
    engines, gaps = build(text)
    (ttft,) = engines.histograms["ttft"]
    assert ttft.bounds == (1.0, 2.5, math.inf)
    assert ttft.counts.tolist() == [[42.0, 50.0, 50.0]]
    assert of(gaps, "ttft") == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param(buckets(("1", 40), ("2.5", 50)), GapReason.NO_INF_BUCKET, id="c034-no-inf"),
        pytest.param(buckets(("1", 40), ("+Inf", "NaN")), GapReason.NON_FINITE, id="nan"),
        pytest.param(buckets(("1", -1), ("+Inf", 5)), GapReason.OUT_OF_RANGE, id="negative"),
        pytest.param(line("vllm:num_requests_running", 1), GapReason.FAMILY_MISSING, id="absent"),
    ],
)
def test_histogram_that_cannot_be_used_is_a_gap(text: str, reason: GapReason) -> None:
    engines, gaps = build(text)
    assert "ttft" not in engines.histograms
    assert of(gaps, "ttft") == [("pod-a", reason)]


def test_one_pods_bad_histogram_leaves_the_others() -> None:
    engines, gaps = build(
        buckets(("1", 4), ("+Inf", 5)), buckets(("1", "NaN"), ("+Inf", 5)), buckets(("1", 6), ("+Inf", 7))
    )
    (ttft,) = engines.histograms["ttft"]
    assert (ttft.rows.tolist(), ttft.counts.tolist()) == ([0, 2], [[4.0, 5.0], [6.0, 7.0]])
    assert of(gaps, "ttft") == [("pod-b", GapReason.NON_FINITE)] * 1


def test_bucket_without_a_bound_is_left_out_and_said() -> None:
    engines, gaps = build(buckets(("1", 4), ("many", 5), ("+Inf", 6)))
    (ttft,) = engines.histograms["ttft"]
    assert ttft.bounds == (1.0, math.inf)
    assert of(gaps, "ttft") == [("pod-a", GapReason.PARSE_ERROR)]


def test_counts_never_fall_towards_higher_bounds_and_order_is_by_bound() -> None:
    engines, _ = build(buckets(("+Inf", 100), ("0.3", 10), ("0.8", 25), ("0.5", 30)))
    (ttft,) = engines.histograms["ttft"]
    assert (ttft.bounds, ttft.counts.tolist()) == ((0.3, 0.5, 0.8, math.inf), [[10.0, 30.0, 30.0, 100.0]])


# Other ways in


def test_series_read_elsewhere_build_the_same_rows() -> None:
    parsed = recorded("0.32.0/dp2_saturated")
    foreign = [
        Series(each.name, {**each.labels, "namespace": "serving", "pod": "pod-a"}, each.value)
        for each in parsed.page.series()
    ]
    expected, _ = build_engines([parsed])
    engines, gaps = build_engines([PodPage(pod=parsed.pod, read_at=100.0, page=make_page(foreign))])
    assert engines.keys == expected.keys
    assert np.array_equal(engines.values, expected.values, equal_nan=True)
    assert gaps == ()


NAMES = [
    "vllm:num_requests_running",
    "vllm_num_requests_waiting",
    "vllm:num_requests_waiting_by_reason",
    "vllm:kv_cache_usage_perc",
    "vllm:engine_sleep_state",
    "vllm:cache_config_info",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "process_start_time_seconds",
    "other",
]
SERIES = st.builds(
    Series,
    st.sampled_from(NAMES),
    st.fixed_dictionaries(
        {},
        optional={
            "engine": st.sampled_from(["0", "1", "10", ""]),
            "model_name": st.sampled_from(["a", "b", ""]),
            "le": st.sampled_from(["1", "1.0", "+Inf", "NaN", "-Inf", "x"]),
            "reason": st.sampled_from(["capacity", "deferred"]),
            "sleep_state": st.sampled_from(["awake", "discard_all"]),
            "finished_reason": st.sampled_from(["stop", "abort"]),
            "num_gpu_blocks": st.sampled_from(["None", "10", "1e400"]),
            "block_size": st.sampled_from(["16", "nan", "-1"]),
        },
    ),
    st.one_of(st.floats(), st.integers(0, 9).map(float)),
)


@given(st.lists(st.lists(SERIES, max_size=8), max_size=4), st.sampled_from(["", "a"]))
def test_no_page_raises_and_only_believable_values_come_out(pods: list[list[Series]], model_name: str) -> None:
    pages = [
        PodPage(pod=Pod(name=f"p{number}", uid=f"u{number}"), read_at=1.0, page=make_page(series))
        for number, series in enumerate(pods)
    ]
    engines, gaps = build_engines(pages, model_name)
    assert list(engines.keys) == sorted(engines.keys)
    assert engines.values.shape == (len(engines.keys), len(ENGINE_COLUMNS))
    for index, signal in enumerate(ENGINE_COLUMNS):
        known = engines.values[:, index][~np.isnan(engines.values[:, index])]
        assert ((known >= signal.low) & (known <= signal.high)).all()
    for layouts in engines.histograms.values():
        for layout in layouts:
            assert layout.counts.shape == (len(layout.rows), len(layout.bounds))
            assert list(layout.bounds) == sorted(set(layout.bounds))
            assert layout.bounds[-1] == math.inf
            assert (np.diff(layout.counts, axis=1) >= 0).all()
            assert (np.diff(layout.rows) > 0).all()
    with_rows = {key.pod_uid for key in engines.keys}
    voided = {gap.pod.replace("p", "u") for gap in gaps if gap.signal == WHOLE_PAGE}
    assert with_rows.isdisjoint(voided)
    assert with_rows | voided == {each.pod.uid for each in pages}
    assert all(len(gap.detail) <= 200 for gap in gaps)
