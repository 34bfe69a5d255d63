"""`objectcache admin backup` and `restore`: everything but the objects, in one file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from objectcache_operations.admin.command import Server, errors_end_the_command, on_server
from objectcache_operations.console.failing import fail

if TYPE_CHECKING:
    from objectcache_schemas.operators.admin_api import Backup

BACKUP_BYTES_MAX = 64 << 20
PASSPHRASE_BYTES_MAX = 4096

PassphraseFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|-", help="Its first line; - is standard input. Default: it is asked for."
    ),
]
BackupFile = Annotated[Path, typer.Argument(metavar="FILE", show_default=False)]


@on_server
def backup(server: Server, file: BackupFile, passphrase_file: PassphraseFile = None) -> None:
    """Write accounts, buckets and schedule to a file; secrets are sealed with a passphrase.

    Objects are not in it.
    """
    import msgspec

    from objectcache_schemas.operators.admin_api import Backup, BackupRequest

    passphrase = _passphrase(passphrase_file, confirm=True)
    with server.connect() as client:
        made = client.send("POST", "/v1/backup", BackupRequest(passphrase=passphrase), Backup)
    data = msgspec.json.format(msgspec.json.encode(made), indent=2)
    _write_private(file, data)
    count = len(made.content.buckets)
    server.show(
        {"file": str(file), "bytes": len(data), "buckets": count},
        lambda: [f"{file}: accounts, {count:,} buckets and the schedule, {len(data):,} bytes"],
    )


@on_server
def restore(
    server: Server,
    file: BackupFile,
    passphrase_file: PassphraseFile = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace accounts and policies that are there.")
    ] = False,
) -> None:
    """Bring back what `backup` wrote. Refused where it would replace something."""
    from objectcache_schemas.operators.admin_api import RestoreReply, RestoreRequest

    with errors_end_the_command():
        read = read_backup(file)
    passphrase = _passphrase(passphrase_file, confirm=False)
    request = RestoreRequest(passphrase=passphrase, backup=read, replace=replace)
    with server.connect() as client:
        done = client.send("POST", "/v1/restore", request, RestoreReply)
    server.show(
        done,
        lambda: [
            f"restored {done.users:,} users, {done.keys:,} keys, {done.tokens:,} tokens; "
            f"{done.buckets_created:,} buckets made, {done.buckets_configured:,} configured",
            *(
                f"bucket {name} has no encoding here: the engine encodes nothing"
                for name in done.buckets_plain
            ),
        ],
    )


def read_backup(file: Path) -> Backup:
    """The backup in a file; raises `InvalidRequest` naming the file."""
    import msgspec

    from objectcache_schemas.errors import InvalidRequest
    from objectcache_schemas.operators.admin_api import Backup

    try:
        with file.open("rb") as stream:
            data = stream.read(BACKUP_BYTES_MAX + 1)
        return msgspec.json.decode(data, type=Backup)
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror or error}") from error
    except (msgspec.MsgspecError, InvalidRequest, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{file} is no backup of this version: {error}") from error


def _passphrase(file: str | None, *, confirm: bool) -> str:
    from objectcache_schemas.operators.admin_api import PASSPHRASE_CHARS_MIN

    if file is None:
        if not sys.stdin.isatty():
            fail("no passphrase: give --passphrase-file FILE, or - for standard input")
        text = typer.prompt("Passphrase", hide_input=True, confirmation_prompt=confirm, err=True)
    elif file == "-":
        text = sys.stdin.readline()
    else:
        text = _first_line(Path(file))
    passphrase = str(text).rstrip("\r\n")
    if len(passphrase) < PASSPHRASE_CHARS_MIN:
        fail(f"the passphrase must have {PASSPHRASE_CHARS_MIN} characters or more")
    return passphrase


def _first_line(file: Path) -> str:
    try:
        with file.open(encoding="utf-8") as stream:
            return stream.readline(PASSPHRASE_BYTES_MAX)
    except OSError as error:
        fail(f"--passphrase-file {file} cannot be read: {error.strerror or error}")
    except UnicodeDecodeError:
        fail(f"--passphrase-file {file} holds no text in UTF-8")


def _write_private(file: Path, data: bytes) -> None:
    """Write a file that only its owner may read, or leave what is there."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(descriptor)
        temporary.replace(file)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        fail(f"{file} cannot be written: {error.strerror or error}")
