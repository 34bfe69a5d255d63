"""Which of aiohttp's parsers reads requests."""

from __future__ import annotations

from aiohttp.http_parser import HttpRequestParser, HttpRequestParserPy

from objectcache_schemas.errors import InvalidRequest


def check_parser() -> None:
    """Raise `InvalidRequest` unless aiohttp parses with its C parser.

    Its pure-Python one is the one with a history of request smuggling.
    """
    if HttpRequestParser is HttpRequestParserPy:
        raise InvalidRequest(
            "aiohttp runs without its C parser; install a built wheel and unset "
            "AIOHTTP_NO_EXTENSIONS"
        )
