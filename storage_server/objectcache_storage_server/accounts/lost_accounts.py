"""A start without accounts.json: the first one of a data directory, or one after the file was lost.

With the file gone every user, key, grant and token is gone, and names of users would be free for
others, who would own their buckets. So the server refuses to start where something says that there
were accounts.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from objectcache_runtime.settings import Settings
from objectcache_schemas.accounts import ROOT_USER
from objectcache_schemas.errors import InvalidRequest
from objectcache_storage_server.accounts import master_key
from objectcache_storage_server.accounts.account_book import FILE_NAME


def are_absent(settings: Settings) -> bool:
    """Whether there is a data directory and no accounts in it.

    Raises `InvalidRequest` where the master key says that there were some.
    """
    if not settings.server.data_dir or (settings.data_dir / FILE_NAME).exists():
        return False
    key = settings.data_dir / master_key.FILE_NAME
    if key.exists():
        _refuse(settings, f"{key} says that there was one")
    return True


def check_owners(settings: Settings, owners: Iterable[str]) -> None:
    """Raise `InvalidRequest` where buckets without accounts belong to users."""
    found = next((owner for owner in owners if owner not in ("", ROOT_USER)), None)
    if found is not None:
        _refuse(settings, f"there are buckets of a user {found}")


def _refuse(settings: Settings, sign: str) -> None:
    file: Path = settings.data_dir / FILE_NAME
    if not settings.storage.start_without_accounts:
        raise InvalidRequest(
            f"{file} is missing, and {sign}: put back the file, or a copy of it. To start with no "
            "users, and then restore a backup of them, start once with "
            "--set storage.start_without_accounts=true"
        )
