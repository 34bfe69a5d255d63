"""`python -m benchmarks.gpu`: everything that waits for a GPU, in one call of at most ten minutes.

Runs unattended on a bare machine with torch and CUDA: the contract of devices, links and copiers;
`objectcache gpu check` and `gpu calibrate`; connectors' copies on CUDA's tensors, and Transformers;
copies in each way beside what the GPU computes; the time to the first token, fetched against
computed, of a model with random weights and of `--model FOLDER`; compute-sanitizer, where it is
installed. Each is a process of its own with a limit of its own: what fails, hangs or finds no time
is told and keeps nothing else from running. Logs and figures go into a folder, with the machine and
the date. `--emulated` runs what it can of it without a GPU, to see that it works: its figures mean
nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

LIMIT_S = 570.0
_LEAST_S = 5.0  # with less time left a step is not begun
_TAIL_LINES = 12
_CONTRACT = tuple(f"tests/contract/test_{name}.py" for name in ("devices", "links", "copier_links"))
_SANITIZER_PLACES = ("/usr/local/cuda/bin", "/opt/cuda/bin")
_EMULATED_CHECK = """
from rich.console import Console
from objectcache_operations.console.gpu_check import report
from tests.emulated_device import EmulatedDevice
first = EmulatedDevice()
raise SystemExit(not report([first, EmulatedDevice(beside=first)], 1 << 20, Console(width=120)))
"""
_EMULATED_CALIBRATION = """
import sys
from pathlib import Path
from rich.console import Console
from objectcache_operations.console.gpu_calibrate import calibrate
from tests.emulated_device import EmulatedDevice
first, console = EmulatedDevice(), Console(width=120)
neighbours = [EmulatedDevice(beside=first)]
calibrate(first, 2 << 20, 32 << 10, Path(sys.argv[1]), console, neighbours)
"""


@dataclass(frozen=True, slots=True)
class Step:
    """One process: what it is asked, for how long, and why it is left out, if it is."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    without: str = ""

    @property
    def is_tests(self) -> bool:
        """Whether pytest runs it, whose last line counts what passed."""
        return "pytest" in self.command


@dataclass(frozen=True, slots=True)
class Ended:
    """How a step went. `code` is that of its process; None is that there was none, or no end."""

    name: str
    how: str  # right, failed, out of time, left out
    took_s: float
    code: int | None
    last_lines: tuple[str, ...]


def python(*arguments: str) -> tuple[str, ...]:
    """A process of this interpreter."""
    return sys.executable, *arguments


def pytest_of(*files: str, chosen: str = "") -> tuple[str, ...]:
    """Tests, by a part of their names."""
    return python("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-k", chosen, *files)


def console(*arguments: str) -> tuple[str, ...]:
    """The command `objectcache`, which need not be installed."""
    return python("-c", "from objectcache_operations import main; main()", *arguments)


def steps_of(folder: Path, model: Path | None, *, emulated: bool) -> list[Step]:
    """In the order in which they are worth their time."""
    kind = "emulated" if emulated else "cuda"
    calibration = str(folder / "calibration.json")
    flags = ("--emulated",) if emulated else ()
    copies = ("-m", "benchmarks.gpu_copies", "--results", str(folder / "copies.json"), *flags)
    ttft = ("-m", "benchmarks.gpu_ttft", *flags)
    check = console("gpu", "check", "--mib", "32")  # of each of 32 rows, in each direction
    if emulated:
        check = python("-c", _EMULATED_CHECK)
    calibrate = console("gpu", "calibrate", "--write", calibration)
    if emulated:
        calibrate = python("-c", _EMULATED_CALIBRATION, calibration)
    sanitizer = sanitizer_here()
    watched = (sanitizer or "", "--tool", "memcheck", "--error-exitcode", "86")
    return [
        Step("contract", pytest_of(*_CONTRACT, chosen=kind), 150),
        Step("check", check, 120),
        Step("connectors", pytest_of("tests/engines/on_device", chosen=kind), 90),
        Step("transformers", pytest_of("tests/engines/test_transformers.py"), 150),
        Step("calibrate", calibrate, 90),
        Step("copies", python(*copies), 160),
        Step("ttft", python(*ttft), 120),
        Step(
            "ttft of a real model",
            python(*ttft, "--model", str(model)),
            120,
            "" if model else "no --model FOLDER was given",
        ),
        Step(
            "sanitizer",
            (*watched, *pytest_of(_CONTRACT[0], chosen=kind)),
            300,
            "" if sanitizer else "compute-sanitizer is not installed",
        ),
    ]


def sanitizer_here() -> str | None:
    """Where compute-sanitizer is."""
    places = os.pathsep.join((os.environ.get("PATH", ""), *_SANITIZER_PLACES))
    return shutil.which("compute-sanitizer", path=places)


def run_steps(steps: Sequence[Step], folder: Path, limit_s: float) -> Iterator[Ended]:
    """One after the other, each with what is left of the time; a log for each."""
    end_s = time.monotonic() + limit_s
    for step in steps:
        left_s = end_s - time.monotonic()
        if step.without:
            yield Ended(step.name, "left out", 0.0, None, (step.without,))
        elif left_s < _LEAST_S:
            yield Ended(step.name, "left out", 0.0, None, ("no time was left",))
        else:
            log = folder / f"{step.name.replace(' ', '_')}.txt"
            yield run_step(step, log, min(step.limit_s, left_s))


def run_step(step: Step, log: Path, limit_s: float) -> Ended:
    """Its process, and all that it has started, has ended when this returns."""
    begun_s = time.monotonic()
    with log.open("wb") as out:
        try:
            process = subprocess.Popen(
                step.command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            return Ended(step.name, "failed", 0.0, None, (str(error),))
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    took_s = time.monotonic() - begun_s
    how = "out of time" if code is None else "right" if code == 0 else "failed"
    lines = log.read_text(errors="replace").rstrip().splitlines()
    if how == "right" and step.is_tests and " passed" not in lines[-1]:
        how = "failed"  # all were skipped: there is no GPU that torch and CUDA can use
    return Ended(step.name, how, took_s, code, tuple(lines[-_TAIL_LINES:]))


def machine() -> dict[str, str]:
    """Where this runs, as far as it can be found out."""
    asked = ("nvidia-smi", "--query-gpu=name,driver_version,pci.bus_id", "--format=csv,noheader")
    torch = "import torch; print(torch.__version__, 'CUDA', torch.version.cuda)"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "GPUs": said_by(asked).replace("\n", "; "),
        "links": said_by(("nvidia-smi", "topo", "-m")),
        "torch": said_by(python("-c", torch)),
        "processors": f"{os.cpu_count()}, {platform.machine()}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": said_by(("git", "rev-parse", "HEAD")),
    }


def said_by(command: Sequence[str]) -> str:
    """What a command prints, or that there is none."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return run.stdout.strip()


def write_results(folder: Path, where: dict[str, str], ended: Sequence[Ended]) -> None:
    """`results.json`, and `results.md` for a reader."""
    whole = {"machine": where, "steps": [asdict(each) for each in ended]}
    (folder / "results.json").write_text(json.dumps(whole, indent=1) + "\n")
    lines = [f"- {name}: {text}" for name, text in where.items() if "\n" not in text]
    lines += ["", "| step | how | seconds |", "| --- | --- | --- |"]
    lines += [f"| {each.name} | {each.how} | {each.took_s:.0f} |" for each in ended]
    for each in ended:
        lines += ["", f"## {each.name}", "", "```", *each.last_lines, "```"]
    (folder / "results.md").write_text("\n".join(lines) + "\n")


def main(
    arguments: Sequence[str] | None = None, steps: Callable[..., list[Step]] = steps_of
) -> int:
    """Entry point; 1 where a step failed or ran out of time."""
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--emulated", action="store_true", help="without a GPU, to try it out")
    parser.add_argument("--only", action="append", help="one of the steps; may be repeated")
    parser.add_argument("--model", type=Path, help="a folder that Transformers loads a model from")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="for everything together")
    parser.add_argument("--results", type=Path, default=Path("bench-results/gpu"))
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    folder: Path = options.results
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [
        step
        for step in steps(folder.resolve(), options.model, emulated=options.emulated)
        if not options.only or step.name in options.only
    ]
    if unknown := set(options.only or ()) - {step.name for step in chosen}:
        parser.error(f"there is no step {', '.join(sorted(unknown))}")
    where, ended = machine(), []
    for each in run_steps(chosen, folder, options.limit_s):
        ended.append(each)
        print(f"{each.name}: {each.how}, {each.took_s:.0f} s", flush=True)
        if each.how != "right":
            print(*(f"    {line}" for line in each.last_lines), sep="\n", flush=True)
        write_results(folder, where, ended)  # also of what is ended before all is
    print(f"{folder}/results.md")
    return int(any(each.how in ("failed", "out of time") for each in ended))


if __name__ == "__main__":
    sys.exit(main())
