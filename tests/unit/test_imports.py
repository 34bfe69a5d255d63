"""What each process loads until it serves, and what it must not.

A start is mostly imports: one of numpy where nothing is computed with it costs every restart.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

# Of fabrics, engines, tools and exporters that a start without them must not pay for.
NOBODYS = (
    "boto3",
    "botocore",
    "hypothesis",
    "matplotlib",
    "nixl",
    "nixl_cu12",
    "opentelemetry",
    "prometheus_client",
    "psutil",
    "pyverbs",
    "rich",
    "torch",
    "websockets",
)
BY_ENTRY_POINT = {
    "objectcache_gateway": (
        "cryptography",
        "numpy",
        "objectcache_gateway.admin.api",
        "objectcache_gateway.admin.serving.routes",
        "objectcache_schemas.chunk_keys",
        "objectcache_runtime.metrics.metric_families",
    ),
    "objectcache_gateway.admin": (
        "awscrt",
        "cryptography",
        "numpy",
        "objectcache_gateway.answering.http_exchange",
        "objectcache_gateway.handlers",
        "objectcache_gateway.server",
        "objectcache_schemas.chunk_keys",
    ),
    "objectcache_gateway.dispatch_service": (
        "awscrt",
        "cryptography",
        "objectcache_gateway.admin",
        "objectcache_gateway.server",
        "objectcache_gateway.storage",
        "objectcache_schemas.chunk_keys",
        "objectcache_storage_server",
    ),
    "objectcache_storage_server": (
        "aiohttp",
        "awscrt",
        "cryptography.x509",
        "objectcache_schemas.chunk_keys",
        "objectcache_runtime.metrics.metric_families",
        "objectcache_storage_server.engines.files.engine",
        "objectcache_storage_server.engines.local.volumes.nvme_volume",
        "objectcache_storage_server.engines.memory.engine",
        "objectcache_storage_server.simulation",
        "objectcache_storage_server.testing",
        "objectcache_fabrics.nixl.fabric",
        "objectcache_fabrics.verbs",
        "objectcache_storage_server.what_if",
    ),
    "objectcache_operations": (
        "aiohttp",
        "awscrt",
        "cryptography",
        "numpy",
        "objectcache.async_client",
        "objectcache_operations.admin.app",
        "objectcache.client",
        "objectcache_gateway",
        "objectcache_storage_server",
        "uvloop",
    ),
}
ITS_PURPOSE = {
    "objectcache_gateway.admin": ("prometheus_client",),  # it merges metrics
    "objectcache_gateway.dispatch_service": ("prometheus_client",),  # it is scraped
}
# A process reads its own; the others' are as good as not there.
ASSIGNMENTS = (
    "gateway.listen=127.0.0.1:0",
    "storage.capacity_bytes=67108864",
    "dispatch.listen=127.0.0.1:0",
    "dispatch.anonymous=true",
)


def loaded_until_ready(module: str, directory: Path) -> set[str]:
    """Names of the modules that `python -m module` imports before it says that it is ready."""
    command = ["serve"] if module == "objectcache_operations" else []
    settings = ["--data-dir", str(directory / "data")]
    for assignment in ASSIGNMENTS:
        settings += ["--set", assignment]
    imports = directory / "imports"
    with (
        imports.open("wb") as errors,
        subprocess.Popen(
            [sys.executable, "-X", "importtime", "-m", module, *command, *settings],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            first_line = process.stdout.readline()
        finally:
            process.send_signal(signal.SIGTERM)
    lines = imports.read_text().splitlines()
    assert first_line.startswith("ready "), lines[-5:]
    return {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}


def is_within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("module", BY_ENTRY_POINT)
def test_a_process_loads_only_what_it_uses(module: str, tmp_path: Path) -> None:
    loaded = loaded_until_ready(module, tmp_path)
    assert "asyncio" in loaded
    assert "objectcache_runtime.settings" in loaded
    unwanted = (*BY_ENTRY_POINT[module], *NOBODYS)
    allowed = ITS_PURPOSE.get(module, ())
    found = {name for name in loaded if is_within(name, unwanted) and not is_within(name, allowed)}
    assert not found


def test_the_clients_names_are_loaded_when_they_are_used() -> None:
    program = (
        "import objectcache, sys\n"
        "assert 'objectcache.client' not in sys.modules\n"
        "for name in objectcache.__all__:\n"
        "    getattr(objectcache, name)\n"
        "assert 'objectcache.client' in sys.modules\n"
        "assert dir(objectcache) == sorted(objectcache.__all__)\n"
        "try:\n"
        "    objectcache.Clinet\n"
        "except AttributeError as error:\n"
        "    print(error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.stderr == ""
    assert run.stdout == "module 'objectcache' has no attribute 'Clinet'\n"


def test_the_dispatch_library_loads_no_server() -> None:
    program = (
        "import objectcache_dispatch, sys\n"
        "assert not {'aiohttp', 'asyncio', 'objectcache_runtime', 'objectcache_gateway'}"
        " & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_nothing_loads_cuda_until_a_gpu_is_opened() -> None:
    """Though the machine may have it."""
    program = (
        "import objectcache.gpu.copier, objectcache.gpu.cuda_device, sys\n"
        "assert not [line for line in open('/proc/self/maps') if 'libcuda' in line]\n"
        "assert not {'torch', 'cuda'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
