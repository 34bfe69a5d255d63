"""A start without accounts.json: the first one of a data directory, or one after the file was lost.

With the file gone every user, key, grant and token is gone, and names of users would be free for
others, who would own their buckets. So the server refuses to start where something says that there
were accounts.
"""

from __future__ import annotations

from collections.abc import Iterable

from objectcache_runtime.settings import Settings
from objectcache_schemas.accounts import ROOT_USER
from objectcache_schemas.errors import InvalidRequest
from objectcache_storage_server.accounts import master_key
from objectcache_storage_server.documents.documents import ACCOUNTS, Documents
from objectcache_storage_server.documents.file_documents import FileDocuments


def are_absent(settings: Settings, documents: Documents) -> bool:
    """Whether there is a data directory and no accounts.

    Raises `InvalidRequest` where the master key beside a file says that there were some.
    """
    if not settings.server.data_dir or documents.get(ACCOUNTS) is not None:
        return False
    key = settings.data_dir / master_key.FILE_NAME
    if isinstance(documents, FileDocuments) and key.exists():
        _refuse(settings, documents, f"{key} says that there was one")
    return True


def check_owners(settings: Settings, documents: Documents, owners: Iterable[str]) -> None:
    """Raise `InvalidRequest` where buckets without accounts belong to users."""
    found = next((owner for owner in owners if owner not in ("", ROOT_USER)), None)
    if found is not None:
        _refuse(settings, documents, f"there are buckets of a user {found}")


def _refuse(settings: Settings, documents: Documents, sign: str) -> None:
    place = documents.place(ACCOUNTS)
    if not settings.storage.start_without_accounts:
        raise InvalidRequest(
            f"{place} is missing, and {sign}: put back the file, or a copy of it. To start with no "
            "users, and then restore a backup of them, start once with "
            "--set storage.start_without_accounts=true"
        )
