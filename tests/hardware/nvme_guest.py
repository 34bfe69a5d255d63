"""The first process of the emulated machine: mounts what Linux needs, runs what it is told, powers
off.

Its arguments are the interpreter and the repository's root. `/runs.json` says what runs: pytests
that go on at once, each with namespaces of its own, and a program after them, whose end is the
machine's.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from typing import Any

POWER_OFF = 0x4321FEDC
WAIT_FOR_DRIVES_S = 120.0
RUNS = "/runs.json"
WRITING = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
CONTROLLERS = "/sys/class/nvme"
# What is tested, and below it.
OUR_PACKAGES = ("schemas", "runtime", "fabrics", "encodings", "storage_server")
SYSTEM_MOUNTS = {"/proc": "proc", "/sys": "sysfs", "/dev": "devtmpfs"}


def main() -> None:
    """Run what is to run, say how the tests ended, and power off whatever happened."""
    libc = ctypes.CDLL(None, use_errno=True)
    exit_code = 125
    try:
        for target, kind in SYSTEM_MOUNTS.items():
            libc.mount(kind.encode(), target.encode(), kind.encode(), 0, None)
        with open(RUNS) as file:
            runs = json.load(file)
        interpreter, repository = sys.argv[1:]
        found = namespaces(runs["drives"])
        print(f"guest: Linux {os.uname().release}, {found} after {uptime_s():.1f} s", flush=True)
        exit_code = run_tests(interpreter, repository, runs["tests"])
        print(f"\nguest: exit code {exit_code}", flush=True)
        if exit_code == 0 and runs["then"]:
            run_program(interpreter, repository, runs["then"])
    finally:
        os.sync()
        libc.reboot(POWER_OFF)


def run_tests(interpreter: str, repository: str, runs: list[dict[str, Any]]) -> int:
    """The first exit code of a pytest that is not 0. What the first prints is seen at once, what
    the others do when they have ended.
    """
    # The project's pytest settings name plugins that are not here.
    command = [interpreter, "-m", "pytest", "-c", "/dev/null", f"--rootdir={repository}"]
    command += ["-p", "no:cacheprovider", "-W", "error", "-o", "markers=timeout: has no effect"]
    started: list[subprocess.Popen[bytes]] = []
    for number, run in enumerate(runs):
        devices = [f"/dev/ng{controller(drive)}n1" for drive in run["drives"]]
        named = environment(repository) | {"NVME_TEST_DEVICES": ":".join(devices)}
        arguments = [*command, f"--basetemp=/tmp/run{number}", *run["arguments"]]
        printed = os.dup(1) if number == 0 else os.open(f"/tmp/printed{number}", WRITING)
        started.append(
            subprocess.Popen(arguments, cwd=repository, env=named, stdout=printed, stderr=printed)
        )
        os.close(printed)
    exit_codes = [process.wait() for process in started]
    for number in range(1, len(runs)):
        with open(f"/tmp/printed{number}", "rb") as file:
            os.write(1, file.read())
    return next(filter(None, exit_codes), 0)


def run_program(interpreter: str, repository: str, arguments: list[str]) -> None:
    """Run a module to its end; `{0}` in an argument is the number of the controller of drive 0."""
    numbers = [controller(drive) for drive in range(len(os.listdir(CONTROLLERS)))]
    command = [interpreter, "-m", *(argument.format(*numbers) for argument in arguments)]
    subprocess.run(command, cwd=repository, env=environment(repository), check=False)


def environment(repository: str) -> dict[str, str]:
    """Where our packages are found."""
    packages = [os.path.join(repository, name) for name in OUR_PACKAGES]
    return {
        "HOME": "/tmp",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": os.pathsep.join((repository, *packages)),
    }


def namespaces(count: int) -> list[str]:
    """The character devices of all namespaces, once the driver has found so many: it looks at the
    drives one beside the other.
    """
    give_up_s = time.monotonic() + WAIT_FOR_DRIVES_S
    while True:
        found = sorted(name for name in os.listdir("/dev") if name.startswith("ng"))
        if len(found) >= count or time.monotonic() > give_up_s:
            return found
        time.sleep(0.05)


def controller(drive: int) -> int:
    """The number that the kernel gave to the controller of a drive: it probes them in any order."""
    for name in os.listdir(CONTROLLERS):
        with open(os.path.join(CONTROLLERS, name, "serial")) as file:
            if file.read().strip() == f"objectcache{drive}":
                return int(name.removeprefix("nvme"))
    raise LookupError(f"there is no drive {drive}")


def uptime_s() -> float:
    """Seconds since the kernel started."""
    with open("/proc/uptime") as file:
        return float(file.read().split()[0])


if __name__ == "__main__":
    main()
