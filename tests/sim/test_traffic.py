"""Workloads by name: what files and shapes give, how seeds and scales vary them, and what is said of a bad file."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from autoscaler.errors import AutoscalerError
from autoscaler.sim.engine import Request
from autoscaler.sim.traffic import SHAPES, SWAP, Workload, load_workload

ROWS = 4000


@pytest.fixture
def day(tmp_path: Path) -> Path:
    """A file of requests over 40 minutes, whose lengths say where in it they stand."""
    path = tmp_path / "day.csv"
    rows = (f"{0.6 * row:.2f},{row + 1},{2 * row + 1}" for row in range(ROWS))
    path.write_text("arrival_s,input_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    return path


def written(folder: Path, text: str | bytes, name: str = "file.csv") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# -- files -----------------------------------------------------------------------------------------------------------


def test_seed_0_of_a_file_is_the_file_itself(day: Path) -> None:
    workload = load_workload(str(day))
    sample = workload.draw(0)
    assert (len(sample), workload.duration_s) == (ROWS, 2400.0)
    assert sample.arrival[[0, 1, -1]].tolist() == [0.0, 0.6, 2399.4]
    assert next(sample.requests()) == Request(0.0, 1, 1)
    assert sample.prompt[-1] == ROWS


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("arrival_s,input_tokens,output_tokens\n0.5,100,20\n3,7,9\n", id="header"),
        pytest.param("0.5,100,20\n3,7,9\n", id="no-header"),
        pytest.param("TIMESTAMP,ContextTokens,GeneratedTokens\n0.5,100,20\n3,7,9\n", id="other-names"),
        pytest.param("output_tokens, model, arrival_s, prompt_tokens\n20,x,0.5,100\n9,y,3,7\n", id="other-order"),
        pytest.param(
            "\ufeffarrival_s,input_tokens,output_tokens\r\n3,7,9\r\n0.5,100,20\r\n\r\n", id="unsorted-windows"
        ),
        pytest.param(gzip.compress(b"arrival_s,input_tokens,output_tokens\n0.5,100,20\n3,7,9\n"), id="gzip"),
    ],
)
def test_files_of_requests(tmp_path: Path, text: str | bytes) -> None:
    sample = load_workload(str(written(tmp_path, text))).draw(0)
    assert list(sample.requests()) == [Request(0.5, 100, 20), Request(3.0, 7, 9)]


def test_epoch_seconds_count_from_the_first(tmp_path: Path) -> None:
    path = written(tmp_path, "1768348800.0,5,5\n1768348860.5,6,6\n")
    assert load_workload(str(path)).draw(0).arrival.tolist() == [0.0, 60.5]


HEADER = "arrival_s,input_tokens,output_tokens\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "is empty", id="empty"),
        pytest.param(HEADER, "no row", id="header-only"),
        pytest.param("who,what\n1,2\n", "line 1: the header 'who,what' names neither", id="unknown-header"),
        pytest.param("5\n6\n", "line 1: needs columns", id="one-column"),
        pytest.param(HEADER + "0,1,2\n1,x,2\n", "line 3: input_tokens is not a number: 'x'", id="no-number"),
        pytest.param(HEADER + "0,1,2\n\n3,4\n", "line 4: 2 columns, output_tokens is missing", id="short-row"),
        pytest.param(HEADER + "0,1,2\n1,0,2\n", "line 3: input_tokens must be at least 1", id="zero-tokens"),
        pytest.param(HEADER + "0,1,2.5\n", "line 2: output_tokens must be a whole number", id="half-token"),
        pytest.param(HEADER + "nan,1,2\n", "line 2: arrival_s must be a time", id="nan"),
        pytest.param("t_s,rps\n0,1\n0,2\n", "line 3: t_s must rise", id="curve-not-rising"),
        pytest.param("t_s,rps\n0,1\n60,-2\n", "line 3: rps must be at least 0", id="negative-rate"),
        pytest.param("0,1,2\n\n1,0,2\n", "line 3: input_tokens must be at least 1", id="behind-a-blank-line"),
        pytest.param(b"\x1f\x8b\x08\x00\x00", "damaged gzip", id="cut-gzip"),
        pytest.param(b"\xff\xfe\x00", "is no text", id="binary"),
    ],
)
def test_bad_files_are_told_with_file_and_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(AutoscalerError) as error:
        load_workload(str(path))
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        pytest.param("diurnla", "neither a file nor a built-in workload (diurnal, ", id="name"),
        pytest.param("diurnal:peak=3", "diurnal: no parameter 'peak' (there is: rps, hours", id="parameter"),
        pytest.param("ramp:rps=fast", "ramp: rps is not a number: 'fast'", id="number"),
        pytest.param("step:hours=0", "step: hours cannot be 0", id="zero-hours"),
        pytest.param("step:rps=-1", "step: rps cannot be -1", id="negative"),
        pytest.param("step:rps=1,to", "'to' is not name=value", id="no-value"),
        pytest.param("missing.csv", "missing.csv: cannot be read: No such file", id="missing-file"),
    ],
)
def test_bad_names(spec: str, message: str) -> None:
    with pytest.raises(AutoscalerError) as error:
        load_workload(spec)
    assert message in str(error.value)


# -- seeds and scales ------------------------------------------------------------------------------------------------


def test_another_seed_moves_arrivals_and_swaps_lengths_nearby(day: Path) -> None:
    workload = load_workload(str(day))
    first, again, other = workload.draw(1), workload.draw(1), workload.draw(2)
    assert list(first.requests()) == list(again.requests())
    assert list(first.requests()) != list(other.requests())
    assert sorted(first.prompt.tolist()) == list(range(1, ROWS + 1))
    assert np.array_equal(first.output, 2 * first.prompt - 1), "a request keeps its two lengths together"
    assert np.all(np.diff(first.arrival) >= 0.0)
    assert first.arrival[0] >= 0.0
    assert first.arrival[-1] <= workload.duration_s
    # both moves together: a length is where the file has it, within the swap and some 6 jitters of 20 s
    moved = first.arrival - 0.6 * (first.prompt - 1)
    assert 15.0 < moved.std() < 30.0
    assert np.abs(moved).max() < 0.6 * SWAP + 6 * 20.0


@pytest.mark.parametrize(
    "scale", [pytest.param(0.5, id="half"), pytest.param(3.0, id="x3"), pytest.param(2.25, id="x2.25")]
)
@pytest.mark.parametrize("kind", ["file", "shape"])
def test_scale_multiplies_the_requests(day: Path, scale: float, kind: str) -> None:
    workload = load_workload(str(day) if kind == "file" else "steady:rps=5,hours=0.5,noise=0")
    base, scaled = workload.draw(0), workload.draw(0, scale)
    assert len(scaled) == pytest.approx(scale * len(base), rel=0.05)
    assert np.all(np.diff(scaled.arrival) >= 0.0)
    half = float(np.mean(scaled.arrival < workload.duration_s / 2))
    assert half == pytest.approx(0.5, abs=0.05)


def test_a_beginning(day: Path) -> None:
    begun = load_workload(str(day)).first(600.0)
    assert (begun.duration_s, len(begun.draw(0))) == (600.0, 1000)
    assert load_workload("steady:hours=1").first(60.0).duration_s == 60.0
    late = load_workload(str(written(day.parent, "5,1,1\n", "late.csv")))
    with pytest.raises(AutoscalerError, match=r"no request arrives in the first 0\.1 s"):
        late.first(0.1)


# -- curves and shapes -----------------------------------------------------------------------------------------------


def per_minute(workload: Workload, seed: int = 0) -> list[float]:
    """Return the requests per second of each minute."""
    counts = np.bincount((workload.draw(seed).arrival // 60.0).astype(int), minlength=int(workload.duration_s // 60))
    return [float(count) / 60.0 for count in counts]


def test_a_curve_is_followed_with_lengths_of_its_own_or_of_a_file(tmp_path: Path, day: Path) -> None:
    curve = written(tmp_path, "t_s,rps,rps_lo\n0,2,1\n600,20,1\n1200,20,1\n", "curve.csv")
    workload = load_workload(f"{curve}:prompt=700,output=90,noise=0")
    assert workload.duration_s == 1800.0
    minutes = per_minute(workload)
    assert minutes[0] == pytest.approx(2.9, abs=1.0)
    assert minutes[5] == pytest.approx(11.9, abs=2.0)
    assert np.mean(minutes[12:]) == pytest.approx(20.0, rel=0.05)
    drawn = workload.draw(0)
    assert drawn.prompt.mean() == pytest.approx(700.0, rel=0.05)
    assert drawn.output.mean() == pytest.approx(90.0, rel=0.05)
    picked = load_workload(f"{curve}:lengths={day}").draw(0)
    assert np.array_equal(picked.output, 2 * picked.prompt - 1), "prompt and output come from one row"


def test_a_curve_may_say_its_mean_lengths(tmp_path: Path) -> None:
    curve = written(tmp_path, "t_s,rps,input_tokens,output_tokens\n0,10,400,50\n600,30,800,90\n")
    drawn = load_workload(str(curve)).draw(0)
    assert drawn.prompt.mean() == pytest.approx(700.0, rel=0.05)
    assert drawn.output.mean() == pytest.approx(80.0, rel=0.05)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        pytest.param("step:rps=4,to=12,hours=1,noise=0", {5: 4.0, 55: 12.0}, id="step"),
        pytest.param("spike:rps=4,factor=5,seconds=60,hours=1,noise=0", {5: 4.0, 30: 20.0, 55: 4.0}, id="spike"),
        pytest.param("ramp:rps=0,to=60,hours=1,noise=0", {10: 10.5, 50: 50.5}, id="ramp"),
        pytest.param("sinusoid:low=5,rps=25,period=1200,hours=1,noise=0", {0: 5.0, 10: 25.0, 20: 5.0}, id="sinusoid"),
        pytest.param("diurnal:rps=12,hours=2,start=19.5,noise=0", {50: 12.0}, id="diurnal"),
    ],
)
def test_shapes(spec: str, expected: dict[int, float]) -> None:
    minutes = per_minute(load_workload(spec))
    for minute, rate in expected.items():
        assert minutes[minute] == pytest.approx(rate, abs=1.0 + 4.0 * (rate / 60.0) ** 0.5)


def test_a_sinusoid_has_the_cold_start_for_its_period() -> None:
    rate = load_workload("sinusoid", cold_start_s=200.0).rate
    assert rate(0.0) == pytest.approx(rate(200.0))
    assert rate(100.0) == pytest.approx(20.0)


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_works_by_its_name_alone(name: str) -> None:
    workload = load_workload(name).first(600.0)
    assert len(workload.draw(0)) > 0
    assert workload.text.startswith(name)


# -- the prefix cache ------------------------------------------------------------------------------------------------


def test_a_file_may_say_which_share_of_a_prompt_is_cached(tmp_path: Path) -> None:
    """The share stays with its prompt, whatever moves, swaps or thins the requests."""
    shares = {1000 + number: round(number / 400.0, 4) for number in range(400)}
    lines = [f"{400 - prompt + 1000},{share},{prompt},20" for prompt, share in shares.items()]
    path = tmp_path / "cached.csv"
    path.write_text("\n".join(["arrival_s,cached_ratio,input_tokens,output_tokens", *lines]))
    workload = load_workload(str(path))
    for sample in (workload.draw(0), workload.draw(3), workload.draw(1, 2.5), workload.first(120.0).draw(0)):
        requests = list(sample.requests())
        assert len(requests) > 100
        assert all(one.cached_ratio == shares[one.prompt_tokens] for one in requests)
    curve = tmp_path / "curve.csv"
    curve.write_text("t_s,rps\n0,5\n60,5\n")
    drawn = list(load_workload(f"{curve}:lengths={path}").draw(1).requests())
    assert len(drawn) > 100
    assert all(one.cached_ratio == shares[one.prompt_tokens] for one in drawn)


def test_without_such_a_column_nothing_is_cached(tmp_path: Path) -> None:
    path = tmp_path / "plain.csv"
    path.write_text("1,500,20\n2,600,30\n")
    assert [one.cached_ratio for one in load_workload(str(path)).draw(0).requests()] == [0.0, 0.0]


@pytest.mark.parametrize("share", ["-0.1", "1.1", "nan"])
def test_a_share_is_from_0_to_1(tmp_path: Path, share: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(f"arrival_s,input_tokens,output_tokens,cached_ratio\n1,500,20,0.5\n2,500,20,{share}\n")
    with pytest.raises(AutoscalerError, match="line 3: cached_ratio must be from 0 to 1"):
        load_workload(str(path))
