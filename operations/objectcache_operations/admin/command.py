"""What the operator's commands share: which server they ask, their flags, and how they end.

A command is a function whose first parameter is a `Server`; `on_server` gives it the flags that say
which one, so that they are written here alone.
"""

from __future__ import annotations

import functools
import inspect
import io
import os
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec, get_type_hints

import typer

from objectcache_operations.console.failing import fail
from objectcache_operations.console.settings_flags import find_settings

if TYPE_CHECKING:
    from objectcache_operations.admin.api_client import AdminAccess, ApiClient, RootKey
    from objectcache_runtime.settings import Settings

P = ParamSpec("P")

ENDPOINT_VARIABLE = "OBJECTCACHE_ADMIN_ENDPOINT"
TOKEN_VARIABLE = "OBJECTCACHE_ADMIN_TOKEN"  # noqa: S105 - a variable's name
PANEL = "Server"
PIPE_CELLS = 160  # where nobody says how wide a line may be


def _option(flag: str, metavar: str, text: str) -> Any:
    return typer.Option(flag, metavar=metavar, help=text, rich_help_panel=PANEL)


Endpoint = Annotated[
    str | None,
    _option(
        "--endpoint", "URL", f"http(s)://HOST:PORT or unix:///PATH. Default: ${ENDPOINT_VARIABLE}."
    ),
]
Token = Annotated[
    str | None, _option("--token", "TOKEN", f"Of the admin API. Default: ${TOKEN_VARIABLE}.")
]
Credentials = Annotated[
    Path | None,
    _option("--credentials", "FILE", "The root key, such as DATA_DIR/root-credentials."),
]
CaFile = Annotated[
    Path | None, _option("--ca-file", "FILE", "PEM, whom to trust at an https endpoint.")
]
DataDir = Annotated[
    str | None, _option("--data-dir", "DIR", "Of a server on this host; needs no credentials.")
]
Config = Annotated[str | None, _option("--config", "FILE", "TOML file of settings.")]
Assignments = Annotated[
    list[str] | None, _option("--set", "SECTION.KEY=VALUE", "Any setting; may be repeated.")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document.", rich_help_panel=PANEL)
]


@dataclass(frozen=True, slots=True)
class Server:
    """Which admin API a command asks, and whether it prints for programs. The flags of all."""

    endpoint: Endpoint = None
    token: Token = field(default=None, repr=False)
    credentials: Credentials = None
    ca_file: CaFile = None
    data_dir: DataDir = None
    config: Config = None
    assignments: Assignments = None
    as_json: AsJson = False

    @contextmanager
    def connect(self, timeout_s: float | None = None) -> Generator[ApiClient]:
        """A connection to the server; an error within the block ends the command. `timeout_s`: of
        silence, where an answer may take longer than others.
        """
        from objectcache_operations.admin.api_client import ApiClient

        with (
            errors_end_the_command(),
            ApiClient(find_access(self, os.environ), timeout_s) as client,
        ):
            yield client

    def show(self, document: Any, lines: Callable[[], Iterable[str]]) -> None:
        """Print the document for programs, or the lines."""
        if self.as_json:
            print_document(document)
        else:
            for line in lines():
                typer.echo(line)


def on_server(
    command: Callable[Concatenate[Server, P], None],
) -> Callable[..., None]:
    """A command with the flags of `Server` in place of its first parameter."""
    call: Callable[..., None] = command
    _, *rest = inspect.signature(command).parameters.values()
    names = [one.name for one in fields(Server)]
    hints = get_type_hints(command, include_extras=True)
    flags = get_type_hints(Server, include_extras=True)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        server = Server(**{name: given.pop(name) for name in names})
        call(server, **given)

    shared = [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=one.default,
            annotation=flags[one.name],
        )
        for one in fields(Server)
    ]
    kept = [
        one.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[one.name]) for one in rest
    ]
    run.__signature__ = inspect.Signature([*kept, *shared])  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in (*kept, *shared)}
    del run.__wrapped__
    return run


@contextmanager
def errors_end_the_command() -> Generator[None]:
    """An error of ours within the block becomes one line, and exit 2."""
    from objectcache_schemas.errors import ObjectCacheError

    try:
        yield
    except ObjectCacheError as error:
        fail(error.message)


# --- finding the server ---------------------------------------------------------------------------


def find_access(server: Server, environment: Mapping[str, str]) -> AdminAccess:
    """Where to ask, and what to show there.

    --endpoint wins over the flags of a server on this host, those over the environment's endpoint.
    Raises `InvalidRequest` that says what to give.
    """
    from objectcache.channel.authorities import ca_file_of, client_context
    from objectcache_operations.admin.api_client import UNIX_SCHEME, AdminAccess
    from objectcache_schemas.errors import InvalidRequest

    local = bool(server.data_dir or server.config or server.assignments)
    named = server.endpoint or (None if local else environment.get(ENDPOINT_VARIABLE))
    if named is None:
        settings = find_settings(server.config, server.data_dir, server.assignments)
        if not settings.server.run_dir and not settings.server.data_dir:
            raise InvalidRequest(
                f"no server is named: give --data-dir DIR of one on this host, or --endpoint URL "
                f"(${ENDPOINT_VARIABLE}) with --token (${TOKEN_VARIABLE}) or --credentials FILE"
            )
        return AdminAccess(f"{UNIX_SCHEME}{settings.admin_socket}")
    if named.startswith(UNIX_SCHEME):
        return AdminAccess(named, server.token)
    token = server.token or (None if server.credentials else environment.get(TOKEN_VARIABLE))
    root_key = None if token else _root_key(server, environment)
    tls = client_context(server.ca_file or ca_file_of(environment))
    return AdminAccess(named, token, root_key, tls)


def _root_key(server: Server, environment: Mapping[str, str]) -> RootKey:
    from objectcache.channel.credentials_file import read_credentials
    from objectcache_operations.admin.api_client import RootKey
    from objectcache_runtime.root_key import ROOT_CREDENTIALS_FILE
    from objectcache_schemas.errors import InvalidRequest

    if server.credentials is not None:
        return RootKey(*read_credentials(server.credentials))
    for prefix in ("OBJECTCACHE_ROOT_", "OBJECTCACHE_"):
        access_key = environment.get(f"{prefix}ACCESS_KEY")
        secret_key = environment.get(f"{prefix}SECRET_KEY")
        if access_key and secret_key:
            return RootKey(access_key, secret_key)
    if server.data_dir is not None:
        return RootKey(*read_credentials(Path(server.data_dir) / ROOT_CREDENTIALS_FILE))
    raise InvalidRequest(
        f"no credentials for the admin API: give --token (${TOKEN_VARIABLE}), or "
        f"--credentials DATA_DIR/{ROOT_CREDENTIALS_FILE}"
    )


def local_access(settings: Settings) -> AdminAccess:
    """The admin API of a server on this host, whose settings these are."""
    from objectcache_operations.admin.api_client import UNIX_SCHEME, AdminAccess

    return AdminAccess(f"{UNIX_SCHEME}{settings.admin_socket}")


# --- printing -------------------------------------------------------------------------------------


def print_json(document: Any) -> None:
    """One document, for programs."""
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


def print_document(document: Any) -> None:
    """One document, for programs: every field of records, also those at their defaults."""
    from objectcache_operations.admin.documents import full_document

    print_json(full_document(document))


def print_view(view: Any) -> None:
    """Something that rich draws, as wide as the terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_CELLS)
    console.print(view)


def view_text(view: Any) -> str:
    """What rich draws as plain text, without a newline at its end."""
    from rich.console import Console

    drawn = io.StringIO()
    Console(file=drawn, highlight=False, width=PIPE_CELLS).print(view)
    return "\n".join(line.rstrip() for line in drawn.getvalue().splitlines())


def print_flushed(texts: Iterable[str]) -> None:
    """Print each as it comes, so that whoever reads a pipe has it at once; return when nobody
    reads any more.
    """
    try:
        for text in texts:
            print(text, flush=True)
    except BrokenPipeError:
        # What is left in the buffer has nowhere to go, and the interpreter flushes at its end.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def read_secret(text: str | None, what: str) -> str | None:
    """A secret of the command line; "-" takes the first line of standard input."""
    if text != "-":
        return text
    line = sys.stdin.readline().rstrip("\r\n")
    if not line:
        fail(f"{what}: standard input is empty")
    return line
