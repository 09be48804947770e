"""The benchmark of the closed loop, on a few minutes."""

from pathlib import Path

import pytest

from bench.closed_loop import main


def test_made_requests_run_and_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--hours", "0.1"]) == 0
    out = capsys.readouterr().out
    assert "requests, 72 ticks: " in out
    assert "peak memory" in out


def test_a_trace_is_a_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "few.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n1.5,100,20\n2.5,300,40\n700,300,40\n")
    assert main([str(trace), "--hours", "0.1", "--profile", "llama-3.1-8b-h100x1", "--profiler"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 requests, 72 ticks: ")
    assert "tottime" in out
