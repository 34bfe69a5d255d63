"""The gateway processes beside this one, over their own sockets."""

from __future__ import annotations

import asyncio

import aiohttp

from objectcache_runtime.settings import Settings
from objectcache_schemas.errors import ObjectCacheError, Unavailable

TIMEOUT_S = 1.0  # a process that takes longer is left out


class GatewayProcesses:
    """Asks every gateway process at once."""

    def __init__(self, settings: Settings) -> None:
        self._sockets = {
            f"gateway-{number}": settings.gateway_socket(number)
            for number in range(settings.gateway.processes)
        }

    @property
    def names(self) -> tuple[str, ...]:
        """The processes, whether they run or not."""
        return tuple(self._sockets)

    async def get(self, path: str) -> dict[str, bytes | ObjectCacheError]:
        """What each answers; an error for one that does not within a second."""
        return await self._ask_all("GET", path, None, self.names)

    async def put(
        self, path: str, body: dict[str, str], names: tuple[str, ...]
    ) -> dict[str, bytes | ObjectCacheError]:
        """Tell those of these names; what each answers, or an error."""
        return await self._ask_all("PUT", path, body, names)

    async def _ask_all(
        self, method: str, path: str, body: dict[str, str] | None, names: tuple[str, ...]
    ) -> dict[str, bytes | ObjectCacheError]:
        answers = await asyncio.gather(*(self._ask(name, method, path, body) for name in names))
        return dict(zip(names, answers, strict=True))

    async def _ask(
        self, name: str, method: str, path: str, body: dict[str, str] | None
    ) -> bytes | ObjectCacheError:
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                aiohttp.ClientSession(
                    connector=aiohttp.UnixConnector(str(self._sockets[name]))
                ) as session,
                session.request(method, f"http://gateway{path}", json=body) as response,
            ):
                if response.status >= 300:
                    return Unavailable(f"{name} answered {response.status}")
                return await response.read()  # of our own process, in as many pieces as it comes
        except (OSError, TimeoutError, aiohttp.ClientError):
            return Unavailable(f"{name} does not answer")
