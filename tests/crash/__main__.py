"""`python -m tests.crash --kills 2000 --seed 7`: longer campaigns than the tests'."""

from __future__ import annotations

import argparse
import secrets
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.crash.campaign import Campaign, StoreFailed
from tests.crash.fork_server import ForkServer
from tests.crash.lossy_fs import lossy_mount
from tests.crash.stores import STORE_KINDS


def main() -> None:
    """Run one campaign as the arguments say."""
    parser = argparse.ArgumentParser("python -m tests.crash", description=__doc__)
    parser.add_argument("--kind", choices=STORE_KINDS, default="local")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--kills", type=int, default=2000, help="processes killed")
    how.add_argument("--cuts", type=int, help="power cuts instead of kills")
    parser.add_argument("--async", action="store_true", dest="has_async")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}")
    with ExitStack() as stack:
        here = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="objectcache-crash-")))
        (here / "stores").mkdir()
        mount = stack.enter_context(lossy_mount(here / "stores")) if chosen.cuts else None
        campaign = Campaign(
            chosen.kind,
            here / "stores",
            here,
            chosen.seed,
            stack.enter_context(ForkServer()),
            has_async=chosen.has_async,
            cut=mount.cut if mount else None,
        )
        try:
            print(campaign.run(chosen.cuts or chosen.kills))
        except StoreFailed as failure:
            raise SystemExit(str(failure)) from None


if __name__ == "__main__":
    main()
