"""`python -m objectcache_storage_server.what_if`: what `objectcache schedule` runs."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import BYTES_PER_GBIT, CAP_GBPS_MAX
from objectcache_schemas.policy_names import EVERY_EPOCH, RATES
from objectcache_storage_server.what_if.prediction import POLICIES, Link, predict
from objectcache_storage_server.what_if.report import as_json, comparison_table, policy_table
from objectcache_storage_server.what_if.request_rows import read_requests

PROGRAM = "objectcache schedule"
DESCRIPTION = """\
Predict, without a server, what requests get that begin at once and share a link: rates in Gbps
(10^9 bits a second), time to first token, and for how long their GPUs wait.

REQUESTS.csv has the columns name, bytes_per_layer, compute_window_s, num_layers, and may have
weight and tenant.
"""
ALONE_GBPS = 100.0  # the paper's link (section 5)
PIPED_COLUMNS = 200  # nothing is cut where no terminal says how wide it is


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Without the usage before it: one line says what is wrong."""
        raise InvalidRequest(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        PROGRAM,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("requests", type=Path, metavar="REQUESTS.csv")
    policy = parser.add_mutually_exclusive_group(required=True)
    policy.add_argument("--policy", choices=POLICIES, metavar="P", help=", ".join(POLICIES))
    policy.add_argument("--all", action="store_true", help="compare all policies")
    parser.add_argument(
        "--rates",
        choices=RATES,
        default=EVERY_EPOCH,
        metavar="HOLD",
        help="how long an assigned rate holds: every_epoch, for_life; default every_epoch",
    )
    parser.add_argument(
        "--cap-gbps", type=float, required=True, metavar="B", help="rate of all of them together"
    )
    parser.add_argument(
        "--margin-gbps",
        type=float,
        default=5.0,
        metavar="M",
        help="what calibrated_stall_opt adds to zero-stall rates; default 5",
    )
    parser.add_argument(
        "--link-gbps",
        type=float,
        metavar="B",
        help="the link on which a request alone is what added TTFT is counted from; "
        f"default {ALONE_GBPS:g}, or the cap if that is more",
    )
    parser.add_argument(
        "--tenant-cap",
        type=_tenant_cap,
        action="append",
        default=[],
        metavar="TENANT=GBPS",
        help="rate of all requests of one tenant; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser


def _tenant_cap(text: str) -> tuple[str, float]:
    tenant, _, gbps = text.rpartition("=")
    if not tenant:
        raise argparse.ArgumentTypeError(f"expected TENANT=GBPS, got {text!r}")
    try:
        return tenant, float(gbps)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{gbps!r} is not a number") from None


def _check_gbps(flag: str, gbps: float, *, zero_is_valid: bool = False) -> None:
    if not (0 < gbps <= CAP_GBPS_MAX or (zero_is_valid and gbps == 0)):
        least = "0 or more" if zero_is_valid else "more than 0"
        raise InvalidRequest(f"{flag} must be {least}, and at most {CAP_GBPS_MAX:g}, got {gbps:g}")


def _link(flags: argparse.Namespace) -> Link:
    if flags.link_gbps is None:
        flags.link_gbps = max(ALONE_GBPS, flags.cap_gbps)
    _check_gbps("--cap-gbps", flags.cap_gbps)
    _check_gbps("--link-gbps", flags.link_gbps)
    _check_gbps("--margin-gbps", flags.margin_gbps, zero_is_valid=True)
    for tenant, gbps in flags.tenant_cap:
        _check_gbps(f"--tenant-cap {tenant}", gbps)
    return Link(
        flags.cap_gbps * BYTES_PER_GBIT,
        flags.margin_gbps * BYTES_PER_GBIT,
        flags.link_gbps * BYTES_PER_GBIT,
        {tenant: gbps * BYTES_PER_GBIT for tenant, gbps in flags.tenant_cap},
    )


def _check_tenants(given: Sequence[str], known: set[str]) -> None:
    for tenant in given:
        if tenant not in known:
            raise InvalidRequest(f"--tenant-cap {tenant}: no request is of this tenant")


def run(arguments: Sequence[str], console: Console) -> None:
    """Print what was asked. Raises `InvalidRequest` naming the flag, or the line of the file."""
    flags = _parser().parse_args(arguments)
    link = _link(flags)
    requests = read_requests(flags.requests)
    _check_tenants(list(link.tenant_caps), {request.demand.tenant for request in requests})
    policies = POLICIES if flags.all else [flags.policy]
    predictions = predict(policies, requests, link, flags.rates)
    if flags.json:
        console.file.write(as_json(predictions, flags.cap_gbps, as_list=flags.all) + "\n")
    elif flags.all:
        console.print(comparison_table(predictions, flags.cap_gbps, flags.link_gbps))
    else:
        console.print(policy_table(predictions[0], flags.cap_gbps, flags.link_gbps))


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_COLUMNS)
    try:
        run(sys.argv[1:] if arguments is None else arguments, console)
    except InvalidRequest as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it quietly
    sys.exit(main())
