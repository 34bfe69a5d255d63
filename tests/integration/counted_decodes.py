"""`python -m tests.integration.counted_decodes MODULE ...`: run a server that says of each
descriptor on standard error that it decoded it.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

from objectcache_schemas.descriptor import Descriptor

DECODED = "a descriptor was decoded"


def main() -> None:
    """Run the module that the first argument names, with the rest."""
    decode = Descriptor.from_bytes

    def counted(*arguments: Any, **named: Any) -> Descriptor:
        print(DECODED, file=sys.stderr, flush=True)
        return decode(*arguments, **named)

    Descriptor.from_bytes = counted  # type: ignore[method-assign]
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
