"""An emulated machine with NVMe drives, in which Linux's own driver runs our tests.

QEMU boots a distribution's kernel that has the driver built in (Debian's cloud kernel) with a file
system in memory: this interpreter, what the tests import, and `nvme_guest.py` as the first process.
It takes no root, no network and no disk image; the drives are sparse files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.hardware.nvme_guest import OUR_PACKAGES

REPOSITORY = Path(__file__).resolve().parents[2]
GUEST = REPOSITORY / "tests" / "hardware" / "nvme_guest.py"
KERNEL_VARIABLE = "NVME_TEST_KERNEL"
HOW_TO_GET_IT = (
    "install qemu-system-x86 and linux-image-cloud-amd64, or name the kernel image, beside its "
    f"config, in {KERNEL_VARIABLE}"
)
QEMU = "qemu-system-x86_64"
# The least that numpy asks for. QEMU 7.2 emulates later ones in part wrongly: kernels crash in it.
PROCESSOR = "Nehalem,+rdrand"
MEMORY_MIB = 1024
TIME_LIMIT_S = 1500  # many times what a quiet machine takes
SERIAL = "objectcache"  # begins a drive's serial number, which ends with its place in the list
_EXIT_CODE = re.compile(r"^guest: exit code (\d+)", re.MULTILINE)
_OTHER_PACKAGES = (
    *("_pytest", "iniconfig", "lmdb", "msgspec", "numpy", "numpy.libs", "packaging"),
    *("pluggy", "pygments", "pytest", "sortedcontainers", "xxhash", "zstandard"),
)
_LEFT_OUT = frozenset(
    {"__pycache__", "ensurepip", "idlelib", "lib2to3", "site-packages", "test", "tests"}
    | {"tkinter", "turtledemo"}
)


class Drive(NamedTuple):
    """An NVMe namespace on a controller of its own."""

    capacity_bytes: int
    lba_bytes: int
    mdts: int  # the controller takes 4 KiB << mdts bytes a command
    nsid: int
    served: Path | None = None  # socket of an NBD server that has its bytes; else a file has them


class Run(NamedTuple):
    """A pytest in the machine, and the drives that are its own, by their number."""

    drives: Sequence[int]
    arguments: Sequence[str]


class Outcome(NamedTuple):
    """How a machine ended; the exit code is `None` where it did not come so far."""

    exit_code: int | None
    console: str


def find_kernel() -> Path | None:
    """A kernel image with the NVMe driver built in, as the config beside it says."""
    named = os.environ.get(KERNEL_VARIABLE)
    images = [Path(named)] if named else sorted(Path("/boot").glob("vmlinuz-*"), reverse=True)
    return next((image for image in images if has_nvme(image)), None)


def has_nvme(image: Path) -> bool:
    """Whether the kernel can be used, or is at least said to be one."""
    config = image.with_name(image.name.replace("vmlinuz", "config"))
    wanted = ("CONFIG_BLK_DEV_NVME=y", "CONFIG_IO_URING=y", "CONFIG_SERIAL_8250_CONSOLE=y")
    try:
        lines = set(config.read_text().splitlines())
    except OSError:
        return False
    return lines.issuperset(wanted)


def missing_part() -> str:
    """What this host lacks for a machine; empty where it lacks nothing."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        return "the machine that is emulated runs this host's x86-64 Linux interpreter"
    if shutil.which(QEMU) is None or find_kernel() is None:
        return f"no QEMU, or no kernel with the NVMe driver built in: {HOW_TO_GET_IT}"
    return ""


def run_in_machine(
    folder: Path,
    drives: Iterable[Drive],
    runs: Sequence[Run],
    then: Sequence[str] = (),
    is_over: Callable[[str], bool] = lambda line: False,
) -> Outcome:
    """Boot, run `python -m pytest` from the repository's root there, once for each of `runs` and
    all at once, then the module and arguments of `then` (`{2}` is the number of drive 2's
    controller), and power off.

    The power goes as soon as `is_over` says so of a line of the console. `folder` takes the drives
    and the initial file system.
    """
    kernel = find_kernel()
    assert kernel is not None
    initial = folder / "initramfs"
    plan = folder / "runs.json"
    drives = list(drives)
    tests = [run._asdict() for run in runs]
    plan.write_text(json.dumps({"drives": len(drives), "tests": tests, "then": list(then)}))
    with initial.open("wb") as archive:
        archive.writelines(archived(guest_files() | {"/runs.json": plan}))
    command: list[str | Path] = [
        *(QEMU, "-accel", "tcg,thread=multi", "-cpu", PROCESSOR, "-M", "q35", "-smp", "2"),
        *("-m", str(MEMORY_MIB), "-nodefaults", "-no-user-config", "-no-reboot", "-nic", "none"),
        *("-display", "none", "-serial", "stdio", "-kernel", kernel, "-initrd", initial),
        *("-append", kernel_command_line()),
    ]
    for number, drive in enumerate(drives):
        command += drive_options(folder, number, drive)
    console = watched(command, is_over)
    found = _EXIT_CODE.search(console)
    return Outcome(int(found[1]) if found else None, console)


def watched(command: Sequence[str | Path], is_over: Callable[[str], bool]) -> str:
    """What a machine prints until its end, which comes at the latest after TIME_LIMIT_S."""
    lines: list[str] = []
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as machine:
        assert machine.stdout is not None
        limit = threading.Timer(TIME_LIMIT_S, machine.kill)
        limit.start()
        try:
            for raw in machine.stdout:
                lines.append(raw.decode(errors="replace").replace("\r", ""))
                if is_over(lines[-1]):
                    break
        finally:
            limit.cancel()
            machine.kill()
    return "".join(lines)


def kernel_command_line() -> str:
    """The kernel's, and after `--` those of the first process."""
    return (
        "console=ttyS0 quiet panic=-1 mitigations=off no_timer_check random.trust_cpu=on -- "
        + " ".join((sys.executable, str(REPOSITORY)))
    )


def drive_options(folder: Path, number: int, drive: Drive) -> list[str]:
    """QEMU's options for one drive, which is made here."""
    path = drive_path(folder, number)
    if drive.served is None:
        path.touch()
        os.truncate(path, drive.capacity_bytes)
    place = path if drive.served is None else f"nbd+unix:///?socket={drive.served}"
    return [
        "-drive",
        f"file={place},if=none,id=drive{number},format=raw,discard=unmap",
        "-device",
        f"nvme,id=nvme{number},serial={SERIAL}{number},mdts={drive.mdts}",
        "-device",
        f"nvme-ns,drive=drive{number},bus=nvme{number},nsid={drive.nsid},"
        f"logical_block_size={drive.lba_bytes},physical_block_size={drive.lba_bytes}",
    ]


def drive_path(folder: Path, number: int) -> Path:
    """The file that has a drive's bytes."""
    return folder / f"drive{number}"


# --- the file system in memory ---


def guest_files() -> dict[str, Path]:
    """What the guest needs: its path there, and the file here. Links are followed."""
    site = Path(sysconfig.get_path("purelib"))
    files = [*tree(Path(sysconfig.get_path("stdlib"))), Path(sys.executable).resolve()]
    files += [site / "py.py", site / "typing_extensions.py"]
    for package in _OTHER_PACKAGES:
        files += tree(site / package)
    for package in (*OUR_PACKAGES, "tests"):
        files += tree(REPOSITORY / package, left_out={"__pycache__"})
    libraries = shared_libraries(file for file in files if is_program(file))
    found = {str(file): file for file in (*files, *libraries)}
    # The virtual environment's own names: its interpreter finds its packages through them.
    environment = Path(sys.prefix)
    found[sys.executable] = Path(sys.executable).resolve()
    found[str(environment / "pyvenv.cfg")] = environment / "pyvenv.cfg"
    found["/init"] = GUEST
    return {name: file for name, file in found.items() if file.is_file()}


def tree(folder: Path, left_out: Iterable[str] = _LEFT_OUT) -> Iterator[Path]:
    """All files below a folder that a test may need."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [
            name for name in folders if name not in left_out and not name.startswith("config-")
        ]
        yield from (Path(parent, name) for name in names if not name.endswith(".a"))


def is_program(file: Path) -> bool:
    """Whether the dynamic linker loads libraries for it."""
    return ".so" in file.name or file.name.startswith("python")


def shared_libraries(programs: Iterable[Path]) -> set[Path]:
    """What the dynamic linker loads for them, itself included."""
    printed = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False)
    return {Path(name) for name in re.findall(r"(/\S+) \(0x", printed.stdout)}


def archived(files: dict[str, Path]) -> Iterator[bytes]:
    """An archive in the kernel's format (cpio, "newc"), with the folders that the files lie in."""
    folders = {str(parent) for name in files for parent in Path(name).parents} - {"/"}
    interpreter = f"#!{sys.executable}\n".encode()
    number = 1
    for name in (*sorted(folders), "/dev", "/proc", "/sys", "/tmp"):
        yield entry(number, name, stat.S_IFDIR | 0o755, b"", 0)
        number += 1
    for name, file in files.items():
        data = file.read_bytes()
        if name == "/init":
            data = interpreter + data
        # Compiled modules are valid only beside sources of the same time.
        yield entry(number, name, stat.S_IFREG | 0o755, data, int(file.stat().st_mtime))
        number += 1
    yield entry(0, "/TRAILER!!!", 0, b"", 0)


def entry(number: int, name: str, mode: int, data: bytes, modified_s: int) -> bytes:
    """One entry: 13 numbers of 8 hexadecimal digits, the name, the data, each filled up to 4."""
    raw_name = name.lstrip("/").encode() + b"\0"
    fields = (number, mode, 0, 0, 1, modified_s, len(data), 0, 0, 0, 0, len(raw_name), 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + raw_name
    return head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4)
