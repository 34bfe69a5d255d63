"""Run ceph/s3-tests against a server of our own: `python -m tests.s3_tests`.

The suite is fetched into .s3-tests, or into $S3_TESTS_FOLDER; $S3_TESTS_SOURCE may name a copy of
its repository. Ends with 0 where every verdict is as expected.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.integration.served import own_environment
from tests.s3_tests.configuration import write_configuration
from tests.s3_tests.server_under_test import ServerUnderTest, server_under_test
from tests.s3_tests.suite import COMMIT, FOLDER_VARIABLE, Suite, fetched
from tests.s3_tests.verdicts import SCHEMES, Verdict, complaints, read_expected, read_verdicts, rows

RESULTS_FOLDER = Path("bench-results") / "s3-tests"


def main() -> int:
    """Run what the command line asks for; returns the exit status."""
    arguments = _arguments()
    suite = fetched(Path(os.environ.get(FOLDER_VARIABLE, ".s3-tests")).absolute())
    results: dict[str, dict[str, Verdict]] = {}
    faults: list[str] = []
    for scheme in SCHEMES if arguments.scheme == "both" else (arguments.scheme,):
        verdicts, found = _judge(suite, scheme, arguments)
        results[scheme] = verdicts
        faults += [f"{scheme}: {line}" for line in found]
        _save(scheme, verdicts)
    _print_table(results)
    print(*faults, sep="\n")
    print(f"{len(faults)} complaints" if faults else "every verdict is as expected")
    return 1 if faults else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.s3_tests", description=__doc__)
    parser.add_argument("--scheme", choices=[*SCHEMES, "both"], default="both")
    parser.add_argument("--jobs", type=int, default=2, help="tests at once")
    parser.add_argument("-k", dest="select", default="", help="run only these, as pytest's -k")
    return parser.parse_args()


def _judge(
    suite: Suite, scheme: str, arguments: argparse.Namespace
) -> tuple[dict[str, Verdict], list[str]]:
    """Verdicts over one protocol, and what is wrong with them."""
    with tempfile.TemporaryDirectory(prefix="oc-s3-tests-", dir="/tmp") as name:
        folder = Path(name)
        with server_under_test(folder, scheme) as server:
            verdicts = _run(suite, server, folder, scheme, arguments)
            ended = server.ended_processes()
            log = server.log_tail()
    found = complaints(verdicts, read_expected(scheme), is_whole=not arguments.select)
    found += [f"a process of the server ended: {process}" for process in ended]
    if "Traceback" in log:
        found.append(f"the server logged a traceback:\n{log}")
    return verdicts, found


def _run(
    suite: Suite,
    server: ServerUnderTest,
    folder: Path,
    scheme: str,
    arguments: argparse.Namespace,
) -> dict[str, Verdict]:
    """All tests side by side, then one by one those that failed and were not expected to: some
    need an account that nobody else uses.
    """
    configuration, record = folder / "s3tests.conf", folder / "record.jsonl"
    write_configuration(configuration, server.endpoint, server.users)
    environment = own_environment()
    if server.certificate_file is not None:
        # For the tests that speak TLS themselves.
        environment["SSL_CERT_FILE"] = str(server.certificate_file)
    suite.run(
        configuration,
        record,
        (),
        select=arguments.select,
        jobs=arguments.jobs,
        environment=environment,
    )
    verdicts = read_verdicts(record)
    again = _to_repeat(verdicts, read_expected(scheme))
    if arguments.jobs > 1 and again:
        suite.run(configuration, record, again, select="", jobs=1, environment=environment)
        verdicts = read_verdicts(record)
    return verdicts


def _to_repeat(verdicts: Mapping[str, Verdict], expected: Mapping[str, str]) -> list[str]:
    """Node ids of what is worth a second try."""
    return [
        verdict.node
        for verdict in verdicts.values()
        if complaints({verdict.test: verdict}, expected, is_whole=False)
    ]


def _save(scheme: str, verdicts: Mapping[str, Verdict]) -> None:
    RESULTS_FOLDER.mkdir(parents=True, exist_ok=True)
    content = {
        "suite_commit": COMMIT,
        "scheme": scheme,
        "tests": {
            verdict.test: {
                "outcome": verdict.outcome.value,
                "message": verdict.message,
                "statuses": {str(status): count for status, count in verdict.statuses.items()},
            }
            for verdict in verdicts.values()
        },
    }
    file = RESULTS_FOLDER / f"{scheme}.json"
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _print_table(results: Mapping[str, Mapping[str, Verdict]]) -> None:
    """Passed, failed and skipped tests per area, one column a protocol."""
    columns = {scheme: rows(verdicts.values()) for scheme, verdicts in results.items()}
    print("\n| tier | area | tests | " + " | ".join(columns) + " |")
    print("|---" * (3 + len(columns)) + "|")
    for together in zip(*columns.values(), strict=True):
        row = together[0]
        cells = " | ".join(str(cell) for cell in together)
        print(f"| {row.tier.value} | {row.area} | {row.test_count} | {cells} |")


if __name__ == "__main__":
    sys.exit(main())
