"""Which part of the package may import which: the rooms of `src/strandline`, and the direction between them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
SOURCE = REPOSITORY / "src"
TESTS = REPOSITORY / "tests"
PACKAGE = "strandline"

STEPS = "checkpoint.steps operators.rewrite operators.step_change"
STATE = "state.batch state.coding state.descriptors state.handles state.key_ranges"
BELOW_RUNTIME = "operators checkpoint state storage config pyspark_releases decoding logs errors redaction"

MAY_IMPORT: dict[str, str] = {
    # What users import. `strandline` itself is the list of public names.
    "strandline": "logs packages job observe sinks operators state state_reader config checkpoint runtime.driver "
    "runtime.protocol errors version",
    "version": "",
    "job": f"rest observe sinks progress runtime.driver {BELOW_RUNTIME}",
    # Where rows go. It knows what a checkpoint is, and nothing of the processes.
    "sinks": "checkpoint storage state.disk_full config decoding errors redaction",
    "progress": "",
    "packages": "errors",
    # What can be seen of a job: facts of a running one, and history that outlives the driver.
    "observe": f"sinks runtime.driver runtime.protocol runtime.liveness {BELOW_RUNTIME} version",
    # The REST interface and the server of the page: answers made of facts.
    "rest": "web observe runtime.driver checkpoint config decoding errors redaction version",
    # The files that a browser loads.
    "web": "",
    # What a person does to a job and to its folder. `strandline` gives it the version.
    "admin": "strandline job rest observe progress state_reader runtime.driver runtime.protocol checkpoint storage "
    "config decoding logs errors redaction",
    # State as a table. It finds checkpoints as a restore does, and decodes what the operators store.
    "state_reader": f"runtime.driver.restore state_files {BELOW_RUNTIME}",
    # The files of a checkpoint's state on local disk: what slots restore and what the state reader reads.
    "state_files": "checkpoint state storage errors",
    # The processes know each other through `protocol`. Only the driver imports `task`, to send it to Spark.
    "runtime": "",
    "runtime.driver": f"sinks progress runtime.task runtime.delivery runtime.protocol runtime.liveness {BELOW_RUNTIME}",
    "runtime.driver.restore": f"sinks runtime.protocol {BELOW_RUNTIME}",
    "runtime.driver.tick_source": "pyspark_releases",
    # Spark's tasks and slots deliver rows to slots.
    "runtime.delivery": f"runtime.protocol runtime.liveness {BELOW_RUNTIME}",
    "runtime.task": f"sinks runtime.delivery runtime.protocol runtime.liveness {BELOW_RUNTIME}",
    "runtime.taskmanager": "runtime.protocol runtime.liveness checkpoint state storage config decoding logs errors "
    "redaction",
    "runtime.slot": f"runtime.delivery runtime.protocol runtime.liveness sinks state_files {BELOW_RUNTIME}",
    # Frozen processes and dead threads, whatever they do.
    "runtime.liveness": "errors",
    "runtime.protocol": BELOW_RUNTIME,
    "operators": "",
    # What a changed step and its state are.
    "operators.step_change": "checkpoint.steps state.descriptors errors",
    "operators.rewrite": "state.backends state.chunks state.coding state.key_ranges errors",
    "operators.base": f"operators.combining {STEPS} state.batch state.descriptors state.handles errors",
    # Rows that are combined before they travel: what a relay sees of it, and what operators need for it.
    "operators.combining": "",
    "operators.combined_rows": "operators.base operators.columns operators.combining errors",
    "operators.user_code": "errors",
    "operators.columns": "checkpoint.steps state.coding pyspark_releases errors",
    "operators.timed": f"operators.base {STATE} state.backends errors",
    "operators.deduplicate": f"operators.base operators.columns operators.timed {STEPS} {STATE} state.backends errors",
    "operators.schema_evolution": f"operators.base operators.columns {STEPS} {STATE} state.backends checkpoint "
    "decoding errors",
    "operators.process": f"operators.base operators.user_code operators.columns operators.timed {STEPS} {STATE} "
    "config errors",
    "operators.spark": f"operators.base operators.user_code operators.columns operators.process {STATE} "
    "pyspark_releases errors",
    "operators.aggregate": f"operators.base operators.combining operators.combined_rows operators.user_code "
    f"operators.columns {STEPS} {STATE} "
    "pyspark_releases errors",
    "operators.windows": f"operators.base operators.combining operators.combined_rows operators.columns "
    f"operators.aggregate operators.timed {STEPS} {STATE} "
    "state.backends config pyspark_releases errors",
    "operators.join": f"operators.base operators.columns operators.timed {STEPS} {STATE} errors",
    # Pure decisions, without I/O: nothing but the errors.
    "checkpoint": "errors",
    # The description of a step, which every operator makes.
    "checkpoint.steps": "",
    "state": "",
    "state.handles": "state.batch state.backends state.coding state.descriptors state.key_ranges config "
    "pyspark_releases errors",
    "state.batch": "state.backends state.chunks state.disk_full state.entry_stream state.key_ranges "
    "state.sorted_runs decoding errors",
    "state.backends": "state.chunks state.disk_full state.entry_stream state.key_ranges state.sorted_runs "
    "config decoding errors",
    "state.descriptors": "errors",
    "state.coding": "errors",
    "state.chunks": "errors",
    "state.disk_full": "errors",
    "state.entry_stream": "errors",
    "state.key_ranges": "errors",
    "state.sorted_runs": "errors",
    "storage": "errors redaction",
    "config": "errors redaction",
    # What differs between the releases of PySpark.
    "pyspark_releases": "errors",
    "errors": "redaction",
    # How log lines look, in every process.
    "logs": "errors redaction",
    # Decoders that any thread may ask for.
    "decoding": "",
    # What a text may show. Errors use it, so that no error can forget to.
    "redaction": "",
    # For users' tests and ours.
    "testing": f"sinks {BELOW_RUNTIME}",
}
"""Each room, and the rooms it may import; a room stands for the rooms inside it, too. A room may import
itself and what is inside it.

The list holds whatever form an import has: at the top, inside a function, or for type checking only. An import for
types is a dependency as well: somebody who reads the module must read the other room, and mypy must.
"""


def modules() -> dict[str, Path]:
    """Every module of the package by its name, which is relative to the package."""
    found = {}
    for path in sorted((SOURCE / PACKAGE).rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported(tree: ast.AST) -> Iterator[str]:
    """The modules of the package that a module imports, wherever in its text.

    A string that is the name of a module counts: that is how modules are imported by name. It does not count after
    "-m", which starts a process.
    """
    started = {
        id(program)
        for node in ast.walk(tree)
        if isinstance(node, ast.List)
        for flag, program in zip(node.elts, node.elts[1:], strict=False)
        if isinstance(flag, ast.Constant) and flag.value == "-m"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == PACKAGE)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            if node.module is not None and node.module.split(".")[0] == PACKAGE:
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    yield name if name in MODULES else node.module
        elif isinstance(node, ast.Constant) and id(node) not in started and node.value in MODULES.keys() - {PACKAGE}:
            yield node.value


def room_of(module: str) -> str:
    """The innermost room of `MAY_IMPORT` that holds the module."""
    name = module.removeprefix(f"{PACKAGE}.")
    while name not in MAY_IMPORT:
        assert "." in name, f"{module} is in no room: add its room to MAY_IMPORT, and say there what it may import"
        name = name.rpartition(".")[0]
    return name


def within(room: str, outer: str) -> bool:
    return room == outer or room.startswith(f"{outer}.")


def may_import(room: str, other: str) -> bool:
    return any(within(other, allowed) for allowed in [room, *MAY_IMPORT[room].split()])


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_the_rooms_that_its_room_may_import(module: str) -> None:
    room = room_of(module)
    imports = {name: room_of(name) for name in imported(ast.parse(MODULES[module].read_text()))}
    assert [f"{module} → {name}" for name, other in imports.items() if not may_import(room, other)] == []


def test_the_rooms_form_no_cycle() -> None:
    graph = {room: {other for other in MAY_IMPORT if other != room and may_import(room, other)} for room in MAY_IMPORT}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError
    assert order.index("errors") < order.index("job")


def test_every_process_knows_the_others_through_the_protocol_alone() -> None:
    processes = ["runtime.driver", "runtime.driver.restore", "runtime.taskmanager", "runtime.slot", "runtime.task"]
    crossing = {
        (one, other)
        for one in [*processes, "runtime.protocol"]
        for other in processes
        if may_import(one, other) and not within(one, other) and not within(other, one)
    }
    assert crossing == {("runtime.driver", "runtime.task")}


def test_nothing_imports_the_tools_for_people_and_tests() -> None:
    assert [room for room in MAY_IMPORT for tool in ("admin", "testing") if may_import(room, tool)] == [
        "admin",
        "testing",
    ]


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_the_documented_direction_is_the_one_that_holds(page: str) -> None:
    """`a → b, c → d`: no room imports one on its left."""
    chain = re.search(r"^(?:job\b.*→.*\n)+", (REPOSITORY / page).read_text(), re.MULTILINE)
    assert chain is not None, f"{page} gives no direction of imports, such as job → runtime → …"
    layers = [[name.strip() for name in layer.split(",")] for layer in chain.group().split("→")]
    depth = {name: number for number, layer in enumerate(layers) for name in layer}
    assert depth.keys() <= {room.split(".")[0] for room in MAY_IMPORT}, f"{page} names a room that does not exist"
    assert depth.keys() >= {"job", "runtime", "operators", "checkpoint", "state", "storage", "config", "errors"}
    upwards = [
        (room, other)
        for room in MAY_IMPORT
        for other in MAY_IMPORT
        if may_import(room, other) and depth.get(room.split(".")[0], -1) > depth.get(other.split(".")[0], len(layers))
    ]
    assert upwards == []


@pytest.mark.parametrize("package", sorted({path.parent for path in MODULES.values()}), ids=lambda path: path.name)
def test_every_package_says_what_lives_in_it(package: Path) -> None:
    init = package / "__init__.py"
    assert init.exists(), f"{package} has no __init__.py"
    text = ast.get_docstring(ast.parse(init.read_text())) or ""
    assert text.strip(), f"{init} has no docstring: say what lives there, and who may import it"


def test_tests_share_helper_modules_and_never_import_each_other() -> None:
    forbidden = re.compile(r"^\s*(?:from|import) tests\.(?:\w+\.)*(?:test_\w+|conftest)\b.*", re.MULTILINE)
    found = {path: forbidden.findall(path.read_text()) for path in TESTS.rglob("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_the_folders_of_tests_mirror_the_rooms() -> None:
    """Apart from whole jobs on Spark, the benchmarks and the pages of the documentation."""
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    others = {folder for folder in folders if not (SOURCE / PACKAGE / folder).is_dir()}
    assert others <= {Path("jobs"), Path("bench"), Path("docs")}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import strandline.errors", ["strandline.errors"]),
        ("from strandline import errors", ["strandline.errors"]),
        ("from strandline.errors import ConfigError", ["strandline.errors"]),
        ("def f():\n    from strandline.job import Job", ["strandline.job"]),
        ("if TYPE_CHECKING:\n    from strandline.job import Job", ["strandline.job"]),
        ("import_module('strandline.job')", ["strandline.job"]),
        ("[sys.executable, '-m', 'strandline.runtime.slot.process']", []),
        ("import pyarrow\nfrom strandline_bench.cli import app\nname = 'strandline'", []),
    ],
)
def test_the_graph_knows_every_form_of_an_import(source: str, expected: list[str]) -> None:
    assert list(imported(ast.parse(source))) == expected
