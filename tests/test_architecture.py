"""The walls: what each room may import, and that the core stays pure."""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "autoscaler"
# It runs inside vLLM, under a name of its own.
PLUGIN = sorted((PACKAGE / "vllm_plugin").rglob("*.py"))
FILES = sorted(set(PACKAGE.rglob("*.py")) - set(PLUGIN))
CORE = sorted((PACKAGE / "core").rglob("*.py"))
IMPURE = frozenset(
    {"asyncio", "io", "logging", "os", "pathlib", "random", "secrets", "shutil", "signal", "socket", "ssl"}
    | {
        "subprocess",
        "sys",
        "tempfile",
        "threading",
        "time",
        "urllib",
        "http",
        "datetime",
        "concurrent",
        "multiprocessing",
    }
)
IMPURE_NAMES = frozenset({"open", "print", "input", "exec", "eval", "__import__", "breakpoint"})
IMPURE_NUMPY = frozenset({"random", "load", "save", "loadtxt", "memmap"})
# Their last bits depend on the CPU, and a replay is equal to the bit on any.
INEXACT_NUMPY = frozenset({"linalg", "dot", "vdot", "inner", "matmul", "vecdot", "tensordot", "einsum", "polyfit"})
SHARED = frozenset({"autoscaler", "autoscaler.core", "autoscaler.ports", "autoscaler.errors"})


def imports(file: Path) -> list[str]:
    """Return the modules that a file imports, anywhere in it."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found.append(node.module or "")
    return found


def room(module: str) -> str:
    """Return the top room of one of our modules, `core` for `autoscaler.core.types`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def ids(files: list[Path]) -> list[str]:
    return [str(file.relative_to(PACKAGE)) for file in files]


@pytest.mark.parametrize("file", CORE, ids=ids(CORE))
def test_core_is_pure(file: Path) -> None:
    for module in imports(file):
        top = module.split(".")[0]
        assert top not in IMPURE, f"{file.name} imports {module}"
        allowed = top in sys.stdlib_module_names or top == "numpy" or module.startswith("autoscaler.core")
        assert allowed, f"{file.name} imports {module}"
        assert not module.startswith("numpy.random")
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in IMPURE_NAMES, f"{file.name} calls {node.func.id}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "np":
            assert node.attr not in IMPURE_NUMPY | INEXACT_NUMPY, f"{file.name} uses np.{node.attr}"
        assert not isinstance(node, ast.MatMult), f"{file.name} multiplies matrices"
        assert not isinstance(node, ast.AsyncFunctionDef | ast.Await), f"{file.name} is asynchronous"


@pytest.mark.parametrize("file", FILES, ids=ids(FILES))
def test_rooms_import_only_the_core_and_the_ports(file: Path) -> None:
    own = room("autoscaler." + ".".join(file.relative_to(PACKAGE).with_suffix("").parts))
    if own in ("cli", "core"):
        return
    more = {
        "loop": {"observe", "schedule"},
        "policy_file": {"schedule"},  # whether a cron expression is one
        "testbed": {"sim"},  # the test bed's pages have the simulator's buckets
    }
    allowed = {"core", "ports", "errors", "", own} | more.get(own, set())
    for module in imports(file):
        if module.split(".")[0] == "autoscaler":
            assert room(module) in allowed, f"{file.relative_to(PACKAGE)} imports {module}"


@pytest.mark.parametrize("file", PLUGIN, ids=ids(PLUGIN))
def test_the_plugin_needs_nothing_but_the_standard_library_and_vllm(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text(), feature_version=(3, 10))):  # the oldest Python of a vLLM image
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1, f"{file.name} leaves its own package"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            for module in modules:
                top = module.split(".")[0]
                assert top in sys.stdlib_module_names | {"vllm"}, f"{file.name} imports {module}"


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import time\nprint(time.time())\n", id="clock"),
        pytest.param("def gram(rows):\n    return rows.T @ rows\n", id="matrix-product"),
        pytest.param("import numpy as np\nsolve = np.linalg.solve\n", id="lapack"),
    ],
)
def test_the_pure_check_can_fail(tmp_path: Path, code: str) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(code)
    with pytest.raises(AssertionError):
        test_core_is_pure(bad)
