"""All processes' metrics on one page: each keeps its own, and here they are put together.

Every sample gets a label `process` ("storage", "gateway-0", "admin"), and where there are several
storage servers those of each get a label `server`. Families of one name stand together under one
HELP and TYPE, as the format demands. The text is not parsed further than that: the pages are our
own, and a scrape must stay cheap with thousands of samples.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping

from aiohttp import web
from prometheus_client.core import Metric

from objectcache_gateway.admin.serving.gateway_processes import GatewayProcesses
from objectcache_gateway.admin.serving.media_types import PROMETHEUS_TEXT
from objectcache_gateway.admin.serving.routes import Call, Nothing, Route
from objectcache_gateway.admin.serving.storage_servers import ask_each, name_of
from objectcache_gateway.storage.known_server import KnownServer
from objectcache_gateway.storage.storage_fleet import StorageFleet
from objectcache_runtime.metrics.metric_families import MetricsPage, counter, gauge, level, total
from objectcache_schemas.errors import ObjectCacheError
from objectcache_schemas.operators.server_state import GetMetrics, Metrics

ADMIN, STORAGE = "admin", "storage"
SEPARATOR = " "  # between the process and the storage server's name
TIMEOUT_S = 1.0  # a process that takes longer is left out
_HEADS = ("# HELP ", "# TYPE ")


class Scrapes:
    """Puts the page together, and keeps what became of each process's part."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        self.audit_lines_lost = 0
        self._up: dict[str, bool] = {}
        self._elapsed_s = 0.0
        self._page = MetricsPage(self.families)

    async def page(self, storage: StorageFleet, gateways: GatewayProcesses) -> bytes:
        """The page of now. A process that does not answer within a second is left out."""
        begun_s = time.monotonic()
        storage_pages, gateway_pages = await asyncio.gather(
            ask_each(storage, GetMetrics(), Metrics, TIMEOUT_S), gateways.get("/metrics")
        )
        answers: dict[str, bytes | ObjectCacheError] = {
            _label(storage, server): answer.text if isinstance(answer, Metrics) else answer
            for server, answer in storage_pages.items()
        }
        answers |= gateway_pages
        pages: dict[str, bytes] = {}
        for name, answer in answers.items():
            self._up[name] = isinstance(answer, bytes)
            if isinstance(answer, bytes):
                pages[name] = answer
            else:
                self.failures[name] += 1
        self._elapsed_s = time.monotonic() - begun_s
        # The admin server's own come last: they say how the others' collection went.
        return merge_pages({**pages, ADMIN: self._page.text()})

    def families(self) -> Iterator[Metric]:
        """How the collection went, as metrics."""
        yield gauge(
            "process_up",
            "1 where the process answered the last scrape.",
            ("scraped",),
            [((name,), up) for name, up in self._up.items()],
        )
        yield counter(
            "scrape_failures_total",
            "Scrapes that a process did not answer within a second.",
            ("scraped",),
            [((name,), self.failures[name]) for name in self._up],
        )
        yield level(
            "scrape_duration_seconds", "How long it took to collect the last page.", self._elapsed_s
        )
        yield total(
            "admin_audit_lines_lost_total",
            "Lines of the admin audit log that could not be written.",
            self.audit_lines_lost,
        )


def _label(storage: StorageFleet, server: KnownServer) -> str:
    """The process, and the server's name behind it where there are several."""
    return f"{STORAGE}{SEPARATOR}{name_of(server)}" if storage.has_several else STORAGE


def merge_pages(pages: Mapping[str, bytes]) -> bytes:
    """Pages in Prometheus' text format, by process, as one page."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for process, page in pages.items():
        process, _, server = process.partition(SEPARATOR)
        label = f'process="{process}"' + (f',server="{server}"' if server else "")
        family, of_family = "", list[str]()
        for line in page.decode().splitlines():
            if line.startswith("#"):
                name = _family_of(line)
                if name is None:
                    continue
                if name != family:
                    family, of_family = name, samples.setdefault(name, [])
                head = heads.setdefault(name, [])
                if len(head) < len(_HEADS) and line[: len(_HEADS[0])] not in map(_kind, head):
                    head.append(line)
            elif line:
                of_family.append(labelled(line, label))
    lines = (line for name in heads for line in (*heads[name], *samples[name]))
    return "\n".join(lines).encode() + b"\n"


def _kind(line: str) -> str:
    return line[: len(_HEADS[0])]


def _family_of(comment: str) -> str | None:
    """The family that a HELP or TYPE line begins."""
    if not comment.startswith(_HEADS):
        return None
    return comment[len(_HEADS[0]) :].partition(" ")[0]


def labelled(sample: str, label: str) -> str:
    """A sample's line with one more label, before its own."""
    name_end = sample.find(" ")
    brace = sample.find("{", 0, name_end)
    if brace < 0:
        return f"{sample[:name_end]}{{{label}}}{sample[name_end:]}"
    return f"{sample[: brace + 1]}{label},{sample[brace + 1 :]}"


_SCRAPES = Scrapes()  # one process has one page


async def get_metrics(call: Call[Nothing, Nothing]) -> web.Response:
    """All processes' metrics, in Prometheus' text format."""
    _SCRAPES.audit_lines_lost = call.reach.audit_log.lost_lines
    text = await _SCRAPES.page(call.storage, call.reach.gateways)
    return web.Response(body=text, headers={"Content-Type": PROMETHEUS_TEXT})


ROUTES = (
    Route(
        *("GET", "/metrics", "metrics:read", "All processes' metrics, in Prometheus' text format"),
        get_metrics,
        content_type="text/plain",
    ),
)
