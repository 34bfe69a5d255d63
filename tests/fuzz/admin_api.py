"""The admin API, by its own OpenAPI description: schemathesis says what to send."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from pathlib import Path

from tests.admin_server import AdminServed
from tests.fuzz.campaign import Outcome

PART = "admin"
SCHEMATHESIS = Path(__file__).parents[2] / ".venv-clients/fuzz/bin/schemathesis"
CHECKS = "not_a_server_error,status_code_conformance,response_schema_conformance"
# A server that drains answers 503, which is what it should; a restored one has other accounts;
# and the token that is used must stay.
LEFT_OUT = "/v1/(drain|restore|processes|tokens/)"
_CASES = re.compile(r"(\d+) generated")


def fuzz_admin(seed: int, examples: int, time_s: int) -> Outcome:
    """Run schemathesis for at most `time_s`, with `examples` for each operation."""
    outcome = Outcome(PART)
    if not SCHEMATHESIS.exists():
        outcome.notes.append("schemathesis is not installed: `make fuzz` installs it")
        return outcome
    begun_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="objectcache-fuzz-") as directory,
        AdminServed(Path(directory) / "data") as served,
    ):
        command = [
            *(str(SCHEMATHESIS), "run", f"{served.url}/openapi.json"),
            *("--header", f"Authorization: Bearer {served.token('admin')}"),
            *("--checks", CHECKS, "--exclude-path-regex", LEFT_OUT),
            *("--max-examples", str(examples), "--seed", str(seed), "--max-time", str(time_s)),
            *("--phases", "examples,coverage,fuzzing", "--request-timeout", "20"),
            *("--continue-on-failure", "--generation-database", "none", "--no-color"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, cwd=directory, check=False)
        cases = _CASES.search(done.stdout)
        outcome.inputs = int(cases[1]) if cases else 0
        if done.returncode:
            outcome.defects.append(done.stdout[-6000:] + done.stderr[-1000:])
        for process, log in ((served.api, "admin.log"), (served.storage, "storage.log")):
            text = (served.data_dir / log).read_text(errors="replace")
            if process.returncode is not None:
                outcome.defects.append(f"the process of {log} has ended")
            if "Traceback" in text:
                start = max(0, text.find("Traceback") - 300)
                outcome.defects.append(f"{log} holds a traceback:\n{text[start : start + 4000]}")
    outcome.elapsed_s = time.monotonic() - begun_s
    return outcome
