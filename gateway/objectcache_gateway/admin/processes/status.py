"""The status page: what goes on, for people, in a browser. Read-only, and off by default.

The page's three files hold nothing secret; still they are behind the same credentials as its data,
so that nobody without a token learns that it is there. A browser asks for a name and a password:
the name is not looked at, the password is an admin token with the scope `status:read`.
"""

from __future__ import annotations

import base64
import binascii
import importlib.resources
import time
from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web

from objectcache_gateway.admin.serving.routes import Call, Nothing, Route
from objectcache_gateway.admin.serving.storage_servers import answers_of
from objectcache_gateway.admin.store.schedule import joined_schedule, latest_traces, schedule_reply
from objectcache_schemas.errors import NotFound
from objectcache_schemas.messages.quotas import GetUsage, Usage
from objectcache_schemas.operators.admin_api import StatusData
from objectcache_schemas.operators.engine_status import EngineState, GetEngineStatus
from objectcache_schemas.operators.schedule import GetSchedule, ScheduleState
from objectcache_schemas.operators.server_state import GetHealth, Health
from objectcache_schemas.operators.traces import GetTraces

PATH = "/status"
TRACES_SHOWN = 24
BASIC = "Basic "
CHALLENGE = 'Basic realm="ObjectCache status", charset="UTF-8"'
# Nothing but the page's own two files runs, is shown or is asked.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_FILES = importlib.resources.files("objectcache_gateway.admin") / "status_page"


def is_status(path: str) -> bool:
    """Whether a path is the page's, or below it."""
    return path == PATH or path.startswith(f"{PATH}/")


def as_bearer(authorization: str) -> str:
    """What a browser sends, as any other client of the API would send it."""
    if not authorization.startswith(BASIC):
        return authorization
    try:
        named = base64.b64decode(authorization.removeprefix(BASIC), validate=True).decode()
    except (binascii.Error, ValueError):
        return "Bearer"
    return f"Bearer {named.partition(':')[2]}"


async def get_data(call: Call[Nothing, Nothing]) -> StatusData:
    """What the page draws: counters, the schedule, and the latest deliveries layer by layer."""
    _check_enabled(call)
    health = await call.storage.call(GetHealth(), Health)
    schedules = await answers_of(call.storage, GetSchedule(), ScheduleState)
    usage = await call.storage.call(GetUsage(), Usage)
    engine = (await call.storage.call(GetEngineStatus(), EngineState)).status
    traces = await latest_traces(call.storage, GetTraces(limit=TRACES_SHOWN))
    answers = (await call.reach.gateways.get("/metrics")).values()
    pages = [page for page in answers if isinstance(page, bytes)]
    return StatusData(
        at_unix_s=time.time(),
        engine=health.engine,
        draining=health.draining,
        stored_bytes=sum(bucket.stored_bytes for bucket in usage.buckets),
        capacity_bytes=engine.capacity_bytes,
        requests=total(pages, "objectcache_requests_total"),
        matched_chunks=total(pages, "objectcache_match_chunks_total", 'result="hit"'),
        missed_chunks=total(pages, "objectcache_match_chunks_total", 'result="miss"'),
        schedule=schedule_reply(joined_schedule(schedules)),
        traces=traces,
    )


def total(pages: Iterable[bytes], name: str, label: str = "") -> float:
    """The sum of a family's samples that have the label, over pages of Prometheus' text format."""
    begin, wanted = f"{name}{{".encode(), label.encode()
    return sum(
        float(line.rpartition(b" ")[2])
        for page in pages
        for line in page.splitlines()
        if line.startswith(begin) and wanted in line
    )


def _file(
    name: str, content_type: str
) -> Callable[[Call[Nothing, Nothing]], Awaitable[web.Response]]:
    async def get_file(call: Call[Nothing, Nothing]) -> web.Response:
        """A file of the page."""
        _check_enabled(call)
        return web.Response(
            body=(_FILES / name).read_bytes(),
            content_type=content_type,
            charset="utf-8",
            headers={"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer"},
        )

    return get_file


def _check_enabled(call: Call[Nothing, Nothing]) -> None:
    if not call.reach.settings.admin.status_page:
        raise NotFound("the status page is off; set admin.status_page to true", code="NoSuchEntity")


ROUTES = (
    Route(
        *("GET", PATH, "status:read", "The status page", _file("status.html", "text/html")),
        content_type="text/html",
    ),
    Route(
        *("GET", f"{PATH}/status.css", "status:read", "The page's style"),
        _file("status.css", "text/css"),
        content_type="text/css",
    ),
    Route(
        *("GET", f"{PATH}/status.js", "status:read", "The page's program"),
        _file("status.js", "text/javascript"),
        content_type="text/javascript",
    ),
    Route(
        *("GET", f"{PATH}/data", "status:read", "What the status page draws", get_data),
        StatusData,
    ),
)
