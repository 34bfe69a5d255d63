"""The example of docs/dual_path.md runs, and gives what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[3] / "docs" / "dual_path.md"


def test_the_example_gives_what_its_comments_say() -> None:
    found = re.search(r"```python\n(from objectcache_dispatch.*?)```", DOCUMENT.read_text(), re.S)
    assert found is not None
    names: dict[str, Any] = {"now_s": 1.0}
    exec(found[1], names)
    decision = names["decision"]
    said = ", ".join((decision.prefill, decision.decode, str(decision.route)))
    assert f"# {said}\n" in found[1]
