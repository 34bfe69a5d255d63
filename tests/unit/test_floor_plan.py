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
    "gateway": "objectcache_gateway",
    "storage_server": "objectcache_storage_server",
    "client": "objectcache",
    "laboratory": "objectcache_laboratory",
    "operations": "objectcache_operations",
}
FOLDER_FILES_MAX = 15
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


@pytest.mark.parametrize("top", [*PACKAGES, "benchmarks"])
def test_a_folder_can_be_looked_over(top: str) -> None:
    counts: dict[str, int] = defaultdict(int)
    for file in (REPOSITORY / top).rglob("*.py"):
        counts[str(file.parent.relative_to(REPOSITORY))] += 1
    assert counts, "the folder is not there"
    assert {folder: n for folder, n in counts.items() if n > FOLDER_FILES_MAX} == {}
