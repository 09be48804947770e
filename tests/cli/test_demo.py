"""The demo, as a person runs it: the real loop over real HTTP, shortened."""

import json
import re
from pathlib import Path

import pytest

from autoscaler.cli.demo import demo_policy
from autoscaler.cli.main import run
from autoscaler.errors import AutoscalerError


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the demo of eight hours has run."""
    folder = tmp_path_factory.mktemp("demo")
    arguments = [
        "demo",
        "--hours",
        "8.5",
        "--report",
        str(folder / "report.html"),
        "--record",
        str(folder / "d.trace.gz"),
    ]
    assert run(arguments) == 0
    return folder


def test_report_is_one_page_that_needs_no_network(demo: Path) -> None:
    page = (demo / "report.html").read_text()
    assert "up_emergency" in page
    text = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert "<!--" not in text
    assert not re.findall(r"(?:src|href)=|@import|url\(", text)
    assert not re.findall(r"<script[^>]*src=", page)


def test_recording_verifies(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", str(demo / "d.trace.gz"), "--verify"]) == 0
    out = capsys.readouterr().out
    assert "verified: 2040 of 2040 recorded decisions come out bit-equal" in out
    assert "1 -> 2" in out


def test_recording_tells_two_policies_apart(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policies = Path(__file__).parents[2] / "policies"
    trace = str(demo / "d.trace.gz")
    assert run(["replay", trace, "--against", str(policies / "latency-first.yaml")]) == 0
    assert "the two policies part on" in capsys.readouterr().out
    assert run(["replay", trace, "--policy", str(policies / "cost-first.yaml"), "--json"]) == 0
    *ticks, summary = capsys.readouterr().out.splitlines()
    assert len(ticks) == 2040
    assert json.loads(summary)["summary"]["demo"]["errors"] == 0


def test_two_policies_in_one_file_are_refused(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "policies/demo.yaml").read_text()
    other = text.replace("name: demo", "name: other").replace("deployment: llama", "deployment: other")
    (tmp_path / "two.yaml").write_text(f"{text}\n---\n{other}")
    with pytest.raises(AutoscalerError, match="takes one policy, not 2"):
        demo_policy(tmp_path / "two.yaml")
