"""The first process of the emulated machine: mounts what Linux needs, runs pytest, powers off.

Its arguments are the interpreter, the repository's root, and pytest's.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time

POWER_OFF = 0x4321FEDC
WAIT_FOR_DRIVES_S = 30.0
SYSTEM_MOUNTS = {"/proc": "proc", "/sys": "sysfs", "/dev": "devtmpfs"}


def main() -> None:
    """Run the tests, say how they ended, and power off whatever happened."""
    libc = ctypes.CDLL(None, use_errno=True)
    exit_code = 125
    try:
        for target, kind in SYSTEM_MOUNTS.items():
            libc.mount(kind.encode(), target.encode(), kind.encode(), 0, None)
        exit_code = run_tests(*sys.argv[1:])
    finally:
        print(f"\nguest: exit code {exit_code}", flush=True)
        os.sync()
        libc.reboot(POWER_OFF)


def run_tests(interpreter: str, repository: str, *arguments: str) -> int:
    """pytest's exit code."""
    print(f"guest: Linux {os.uname().release}, {namespaces()} after {uptime_s():.1f} s", flush=True)
    packages = [os.path.join(repository, name) for name in ("schemas", "storage_server")]
    environment = {
        "HOME": "/tmp",
        "NVME_TEST_DEVICES": ":".join(f"/dev/{name}" for name in namespaces()),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": os.pathsep.join((repository, *packages)),
    }
    # The project's pytest settings name plugins that are not here.
    command = [interpreter, "-m", "pytest", "-c", "/dev/null", f"--rootdir={repository}"]
    options = ["-p", "no:cacheprovider", "-W", "error", *arguments]
    return subprocess.run(
        [*command, *options], cwd=repository, env=environment, check=False
    ).returncode


def namespaces() -> list[str]:
    """The character devices of all namespaces, once the driver has found any."""
    give_up_s = time.monotonic() + WAIT_FOR_DRIVES_S
    while True:
        found = sorted(name for name in os.listdir("/dev") if name.startswith("ng"))
        if found or time.monotonic() > give_up_s:
            return found
        time.sleep(0.05)


def uptime_s() -> float:
    """Seconds since the kernel started."""
    with open("/proc/uptime") as file:
        return float(file.read().split()[0])


if __name__ == "__main__":
    main()
