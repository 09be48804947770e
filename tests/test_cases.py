"""Every failure case of actuating and of operating has a test against a real API server; those of choosing batching
limits have one of the choice.
"""

import re
from pathlib import Path

import pytest

CLUSTER = Path(__file__).parent / "cluster"
CHOICES = Path(__file__).parent / "core" / "test_cases_tune.py"
ACTUATE = "C090 C092 C094 C096 C098 C099 C100 C101 C102 C104 C106 C109 C110 C111 C112"
OPS = "C140 C141 C143 C144 C146 C147 C149 C150 C152 C154"
TUNE = "C100 C113 C114 C116 C118 C119 C120"


@pytest.fixture(scope="module")
def tested() -> set[str]:
    """Return the cases by which tests in tests/cluster are named."""
    names = re.compile(r"^(?:async )?def test_(c\d{3})_", re.MULTILINE)
    return {name.upper() for file in CLUSTER.glob("test_*.py") for name in names.findall(file.read_text())}


@pytest.mark.parametrize("case", [*ACTUATE.split(), *OPS.split()])
def test_case_has_a_test_on_a_cluster(case: str, tested: set[str]) -> None:
    assert case in tested


@pytest.mark.parametrize("case", TUNE.split())
def test_case_of_tuning_has_a_test(case: str) -> None:
    assert re.search(rf"^    def test_{case.lower()}_", CHOICES.read_text(), re.MULTILINE)
