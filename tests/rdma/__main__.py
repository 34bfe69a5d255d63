"""python -m tests.rdma [PYTEST ARGUMENTS]: the tests in `guest`, in an emulated host, all in one.

The exit code is pytest's; 0, with the reason, where this host lacks what it takes.
"""

from __future__ import annotations

import compileall
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
RUN = REPOSITORY / "tests" / "rdma" / "host" / "run.sh"
SYSTEM_PYVERBS = Path("/usr/lib/python3/dist-packages/pyverbs")
DEFAULT_CACHE = "/var/cache/objectcache-rdma"
TIME_LIMIT_S = 2700  # many times what a quiet machine takes
MEMORY_MIB = 3072
# Importing is slow there: nothing is loaded that is not needed.
PYTEST = (
    *("-m", "pytest", "-p", "no:cacheprovider", "-p", "pytest_timeout"),
    *("-p", "pytest_asyncio.plugin", "--timeout", "900", "-o", "faulthandler_timeout=890"),
)


def missing_part() -> str:
    """What this host lacks; empty where it lacks nothing."""
    cache = Path(os.environ.get("RDMA_HOST_CACHE", DEFAULT_CACHE))
    if os.uname().sysname != "Linux" or os.uname().machine != "x86_64":
        return "the host that is emulated runs this one's x86-64 Linux programs"
    if shutil.which("qemu-system-x86_64") is None:
        return "qemu-system-x86 is not installed; tests/rdma/host/setup.sh installs it"
    if not (cache / "initrd.gz").exists():
        return f"there is no kernel in {cache}; tests/rdma/host/setup.sh puts one there"
    return missing_binding()


def missing_binding() -> str:
    """What keeps this interpreter from importing the system's pyverbs."""
    version = f"cpython-{sys.version_info.major}{sys.version_info.minor}"
    if not SYSTEM_PYVERBS.exists():
        return "python3-pyverbs is not installed; tests/rdma/host/setup.sh installs it"
    if not list(SYSTEM_PYVERBS.glob(f"qp.{version}-*.so")):
        return f"the system's pyverbs was not built for this interpreter, {version}"
    return ""


def run(arguments: list[str]) -> int:
    """Run pytest in an emulated host; its exit code."""
    _compile_all()
    with tempfile.TemporaryDirectory(prefix="rdma-") as folder:
        # A folder with nothing else in it: the system's other packages must not be found.
        (Path(folder) / "pyverbs").symlink_to(SYSTEM_PYVERBS)
        environment = {
            **os.environ,
            "PYTHONPATH": folder,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
        }
        tests = str(REPOSITORY / "tests" / "rdma" / "guest")
        named = any("::" in each or each.endswith(".py") for each in arguments)
        command = [
            *(str(RUN), "-t", str(TIME_LIMIT_S), "-m", str(MEMORY_MIB), "-n", "pair"),
            *(folder, "env", f"--chdir={REPOSITORY}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1"),
            *(sys.executable, *PYTEST, *arguments, *([] if named else [tests])),
        ]
        return _run_to_its_end(command, environment)


def _compile_all() -> None:
    """Compile every module of ours: in there it takes minutes, and nothing compiled can be kept."""
    for package in sorted(REPOSITORY.glob("*/objectcache*")):
        compileall.compile_dir(package, quiet=2)
    compileall.compile_dir(REPOSITORY / "tests", quiet=2)


def _run_to_its_end(command: list[str], environment: dict[str, str]) -> int:
    """The exit code of a program; whatever ends this one ends it and all that it started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        sys.exit(0)
    if reason := missing_part():
        print(f"SKIPPED: the tests over RDMA are not run: {reason}")
        sys.exit(0)
    sys.exit(run(sys.argv[1:]))
