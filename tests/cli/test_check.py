"""`autoscaler check`, and what the command line as a whole does with arguments and errors."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from autoscaler import __version__
from autoscaler.cli.main import run
from autoscaler.policy_file import shipped_policies

HEAD = "apiVersion: autoscaler/v1alpha1\nkind: ScalingPolicy\n"
GOOD = f"""{HEAD}metadata: {{name: chat}}
spec:
  target: {{namespace: serving, deployment: chat-a}}
  replicas: {{max: 8}}
"""
TEN_MISTAKES = f"""{HEAD}metadata:
  name: Chat
spec:
  target: {{deployment: chat-a, kind: StatefulSet}}
  replicas: {{min: 9, max: 8}}
  interval: soon
  signals:
    vllm: {{port: 70000}}
  slo:
    ttft: {{seconds: 2, quantile: 99}}
  score:
    weights: {{memory: 0.5, backlog: 0.5, latency: 0.5}}
  scaleUp: {{threshold: 70, maxSteps: 2}}
  scaleDown: {{threshold: 0.4, maxStep: 0}}
"""
MISTAKEN_KEYS = (
    "metadata.name",
    "spec.target.kind",
    "spec.replicas.min",
    "spec.interval",
    "spec.signals.vllm.port",
    "spec.slo.ttft.quantile",
    "spec.score.weights",
    "spec.scaleUp.threshold",
    "spec.scaleUp.maxSteps",
    "spec.scaleDown.maxStep",
)


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """Return the path of a good policy."""
    path = tmp_path / "chat.yaml"
    path.write_text(GOOD, encoding="utf-8")
    return path


def test_a_good_file(policy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(policy)]) == 0
    out, err = capsys.readouterr()
    assert out == "ok: chat: serving/chat-a, 1 to 8 replicas, every 5s\n"
    assert err == ""


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        pytest.param(["-l", "team=a"], 0, "ok: chat: ", id="its label"),
        pytest.param(["-n", "serving", "-n", "web"], 0, "ok: chat: ", id="its namespace"),
        pytest.param(["-l", "team!=a"], 2, "--selector team!=a selects none of the 1 policies", id="another label"),
        pytest.param(["-n", "web"], 2, "chat in serving (team=a)", id="another namespace"),
    ],
)
def test_a_selection_lists_what_it_selects(
    arguments: list[str], code: int, words: str, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy.write_text(GOOD.replace("{name: chat}", "{name: chat, labels: {team: a}}"), encoding="utf-8")
    assert run(["check", str(policy), *arguments]) == code
    out, err = capsys.readouterr()
    assert words in (err if code else out)


def test_every_shipped_policy(capsys: pytest.CaptureFixture[str]) -> None:
    # Each by itself: two policies for one Deployment would be a mistake.
    for path in sorted(shipped_policies().glob("*.yaml")):
        assert run(["check", str(path)]) == 0
    assert "ok: seed-weighted: " in capsys.readouterr().out


def test_a_directory_is_checked_whole(policy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (policy.parent / "other.yml").write_text(GOOD.replace("chat", "other"), encoding="utf-8")
    (policy.parent / "notes.txt").write_text("nothing", encoding="utf-8")
    assert run(["check", str(policy.parent)]) == 0
    assert capsys.readouterr().out.count("ok: ") == 2


def test_ten_mistakes_are_all_told_at_once_each_with_key_value_and_place(
    policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy.write_text(TEN_MISTAKES, encoding="utf-8")
    assert run(["check", str(policy)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == len(MISTAKEN_KEYS)
    for key in MISTAKEN_KEYS:
        (line,) = (line for line in lines if f": {key}" in line)
        assert line.startswith(f"error: {policy}:")
    assert any("spec.signals.vllm.port = 70000" in line for line in lines)


def test_mistakes_of_several_files_are_told_together(policy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = policy.with_name("other.yaml")
    other.write_text(GOOD.replace("max: 8", "max: 0"), encoding="utf-8")
    policy.write_text(GOOD.replace("max: 8", "max: -1"), encoding="utf-8")
    assert run(["check", str(policy), str(other)]) == 2
    err = capsys.readouterr().err
    assert str(policy) in err
    assert str(other) in err


def test_a_warning_is_no_mistake(policy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy.write_text(GOOD + "  scaleDown: {stabilization: 10s}\n", encoding="utf-8")
    assert run(["check", str(policy)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("ok: chat")
    assert err.startswith("warning: ")
    assert "spec.scaleDown.stabilization" in err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param("", "is empty", id="empty"),
        pytest.param("<html><body>Login</body></html>", "must be a mapping", id="HTML"),
        pytest.param("{", "is not YAML", id="cut"),
        pytest.param("kind: Deployment\napiVersion: apps/v1\n", "kind", id="another kind"),
    ],
)
def test_a_file_that_is_no_policy(content: str, words: str, policy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy.write_text(content, encoding="utf-8")
    assert run(["check", str(policy)]) == 2
    err = capsys.readouterr().err
    assert str(policy) in err
    assert words in err


def test_the_schema_is_one_and_takes_a_good_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(yaml.safe_load(GOOD))
    assert not validator.is_valid(yaml.safe_load(TEN_MISTAKES))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        pytest.param(["check"], 2, "name at least one policy file", id="nothing to check"),
        pytest.param(["check", "no-such-file.yaml"], 2, "no-such-file.yaml: cannot be read", id="no such file"),
        pytest.param(["check", "--sceme"], 2, "--sceme", id="an unknown option"),
        pytest.param(["chekc"], 2, "chekc", id="an unknown command"),
        pytest.param(["run"], 2, "POLICIES", id="run without a policy"),
        pytest.param(["replay"], 2, "TRACE", id="replay without a recording"),
    ],
)
def test_bad_arguments(arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == code
    err = capsys.readouterr().err
    assert words in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments", [["--help"], ["-h"], ["run", "-h"], ["replay", "-h"], ["check", "-h"], ["demo", "-h"]]
)
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 0
    assert capsys.readouterr().out.startswith("Usage: autoscaler")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    run(["--help"])
    out = capsys.readouterr().out
    assert [word for word in ("run", "replay", "check", "demo") if f"\n  {word} " in out] == [
        "run",
        "replay",
        "check",
        "demo",
    ]


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"autoscaler, version {__version__}"
