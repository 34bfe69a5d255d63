"""`python -m tests.soak --seconds 3600`: the servers under mixed load; whether they stay flat."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from tests.soak.run import Outcome, soak

SAMPLES = 240


def main() -> int:
    """Run, print, and exit 1 where something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0)
    seconds = parser.parse_args().seconds
    folder = Path(tempfile.mkdtemp(prefix="oc-soak-"))
    try:
        outcome = soak(folder / "data", seconds, seconds / SAMPLES)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _print(outcome)
    return 1 if outcome.wrong else 0


def _print(outcome: Outcome) -> None:
    done = ", ".join(f"{count} {what}" for what, count in sorted(outcome.done.items()))
    print(f"{outcome.seconds:g} s: {done}")
    for process, samples in outcome.samples.items():
        print(f"{process}: own memory MiB, descriptors, threads")
        for sample in samples[:: max(1, len(samples) // 12)]:
            mib = sample.rss_bytes / (1 << 20)
            print(f"  {sample.at_s:8.0f} s {mib:8.1f} {sample.descriptors:6d} {sample.threads:6d}")
    print("\n".join(outcome.wrong) or "flat")


if __name__ == "__main__":
    raise SystemExit(main())
