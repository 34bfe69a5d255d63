"""`python -m benchmarks.s3`: `python -m benchmarks --only s3`."""

from __future__ import annotations

import sys

from benchmarks.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["--only", "s3", *sys.argv[1:]]))
