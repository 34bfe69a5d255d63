"""Where things live: folders that can be looked over, one class of a name, and no circles."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGES = {
    "schemas": "objectcache_schemas",
    "runtime": "objectcache_runtime",
    "fabrics": "objectcache_fabrics",
    "dispatch": "objectcache_dispatch",
    "encodings": "objectcache_encodings",
    "gateway": "objectcache_gateway",
    "storage_server": "objectcache_storage_server",
    "client": "objectcache",
    "laboratory": "objectcache_laboratory",
    "relay": "objectcache_relay",
    "operations": "objectcache_operations",
}
FOLDER_FILES_MAX = 15
# A file here is one story told with whole processes, and is found by its name; what they share lies
# in few files. More of them is no more to understand at once.
FLAT_FOLDERS_FILES_MAX = {
    "tests/integration": 80,
    "tests/engines": 35,  # one environment and one conftest for all engines
    "tests/vllm_serve": 30,  # one environment, too
    "tests/crash": 20,  # one campaign and its parts, run as a program
}
# Of tests/unit: what is no package's room.
OTHER_UNIT_ROOMS = {"benchmarks", "documents", "judges"}
NAMED_BY_USERS = {"ObjectCacheConnector"}  # of vLLM and of LMCache, in their configurations


def modules(top: str) -> Iterator[tuple[str, Path]]:
    """Every module of a package, by its dotted name."""
    for file in sorted((REPOSITORY / top / PACKAGES[top]).rglob("*.py")):
        parts = file.relative_to(REPOSITORY / top).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), file


def imported(file: Path, known: set[str]) -> Iterator[str]:
    """The modules among `known` that a file imports, wherever it does."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield from {whole if whole in known else node.module} & known
        elif isinstance(node, ast.Import):
            yield from {alias.name for alias in node.names} & known


@pytest.mark.parametrize("top", PACKAGES)
def test_no_module_imports_itself_by_way_of_others(top: str) -> None:
    files = dict(modules(top))
    known = set(files)
    graph = {name: set(imported(file, known)) - {name} for name, file in files.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_a_public_class_shares_its_name_with_no_other() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for top in PACKAGES:
        for name, file in modules(top):
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes[node.name].append(name)
    shared = {name: where for name, where in homes.items() if len(where) > 1}
    assert {name: shared[name] for name in shared.keys() - NAMED_BY_USERS} == {}


@pytest.mark.parametrize("top", [*PACKAGES, "benchmarks", "tests"])
def test_a_folder_can_be_looked_over(top: str) -> None:
    counts: dict[str, int] = defaultdict(int)
    for file in (REPOSITORY / top).rglob("*.py"):
        counts[file.parent.relative_to(REPOSITORY).as_posix()] += 1
    assert counts, "the folder is not there"
    assert {
        folder: n
        for folder, n in counts.items()
        if n > FLAT_FOLDERS_FILES_MAX.get(folder, FOLDER_FILES_MAX)
    } == {}


@pytest.mark.parametrize("folder", FLAT_FOLDERS_FILES_MAX)
def test_a_flat_folder_is_there_and_has_more_files_than_others(folder: str) -> None:
    assert len(list((REPOSITORY / folder).glob("*.py"))) > FOLDER_FILES_MAX


def test_unit_tests_lie_in_rooms_of_the_packages_names() -> None:
    unit = Path(__file__).parent
    strays = []
    for folder in sorted({file.parent.relative_to(unit) for file in unit.rglob("*.py")}):
        top, *rooms = folder.parts or ("",)
        if top in PACKAGES:
            if not REPOSITORY.joinpath(top, PACKAGES[top], *rooms).is_dir():
                strays.append(str(folder))
        elif top and top not in OTHER_UNIT_ROOMS:
            strays.append(str(folder))
    assert strays == []
