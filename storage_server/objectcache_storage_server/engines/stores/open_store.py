"""The store that an address names: of a folder, of S3, of RADOS, of DAOS."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from objectcache_schemas.errors import Conflict, InvalidRequest
from objectcache_storage_server.engines.stores.shared_store import SharedStore

OF_A_DATA_DIRECTORY = ("master-key", "shared-index", "root-credentials", "index/data.mdb")
ADDRESSES = (
    "file:///PATH, s3://BUCKET/PREFIX?endpoint=..&region=.., rados://POOL?conf=..&id=.. or "
    "daos://POOL/CONTAINER"
)


def open_store(
    address: str, *, create: bool = False, access_key_id: str = "", secret_access_key: str = ""
) -> SharedStore:
    """Open a store; with `create` make it where there is none yet.

    The key is S3's; without one it is what botocore finds. Raises `InvalidRequest` for an address
    that is wrong, or a store that lacks what the log is built on; `Unavailable` where there is no
    store or it does not answer.
    """
    match urlsplit(address).scheme:
        case "file":
            from objectcache_storage_server.engines.stores.folder.folder_store import FolderStore

            return FolderStore(_folder_of(address), create=create)
        case "s3":
            return _s3_store(address, create, access_key_id, secret_access_key)
        case "rados":
            from objectcache_storage_server.engines.stores.rados.rados_settings import (
                RadosSettings,
            )
            from objectcache_storage_server.engines.stores.rados.rados_store import RadosStore

            return RadosStore(RadosSettings.from_url(address), create=create)
        case "daos":
            from objectcache_storage_server.engines.stores.daos.daos_store import DaosStore

            return DaosStore(*_pool_and_container(address), create=create)
        case unknown:
            raise InvalidRequest(f"the store's address begins with {unknown!r}; use {ADDRESSES}")


def create_store(address: str) -> None:
    """Make a store where there is none, and let go of it. Raises `Conflict` where there is one,
    otherwise as `open_store`.
    """
    if urlsplit(address).scheme == "file":
        folder = _folder_of(address).resolve()
        for each in (folder, *folder.parents):
            if any((each / name).exists() for name in OF_A_DATA_DIRECTORY):
                raise InvalidRequest(_not_apart(folder, each))
    store = open_store(address, create=True)
    store.close()
    if not store.was_made:
        raise Conflict(f"there is a store in {address} already: nothing was made")


def check_apart(address: str, data_dir: Path) -> None:
    """Raise `InvalidRequest` where a store in a folder, and the data directory of one of its
    servers, are one in the other: what is removed or moved of the one would be of the other.
    """
    if urlsplit(address).scheme == "file":
        folder, own = _folder_of(address).resolve(), data_dir.resolve()
        if folder.is_relative_to(own) or own.is_relative_to(folder):
            raise InvalidRequest(_not_apart(folder, own))


def _not_apart(folder: Path, data_dir: Path) -> str:
    return (
        f"the store's folder {folder} and the data directory {data_dir} of a server are one in the "
        f"other: a data directory is one server's alone, and may be deleted; give the store a "
        f"folder apart from it"
    )


def _s3_store(
    address: str, create: bool, access_key_id: str, secret_access_key: str
) -> SharedStore:
    from objectcache_storage_server.engines.stores.s3.s3_settings import S3Settings

    settings = S3Settings.from_address(address, access_key_id, secret_access_key)
    try:
        from objectcache_storage_server.engines.stores.s3.s3_store import S3Store
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "obstore":
            raise
        raise InvalidRequest(
            "a store in S3 needs the package obstore: pip install 'objectcache[s3]'"
        ) from error
    return S3Store(settings, create=create)


def _folder_of(address: str) -> Path:
    parts = urlsplit(address)
    if not address.startswith("file:///") or parts.query or parts.fragment:
        raise InvalidRequest(
            f"a store in a folder is file:///PATH, an absolute one without options, got {address!r}"
        )
    folder = Path(unquote(parts.path))
    if folder.resolve() == Path("/"):
        raise InvalidRequest(f"{address} is the root directory: give the store a folder of its own")
    return folder


def _pool_and_container(address: str) -> tuple[str, str]:
    parts = urlsplit(address)
    pool, container = unquote(parts.netloc), unquote(parts.path).strip("/")
    if parts.query or parts.fragment or not pool or not container or "/" in container:
        raise InvalidRequest(
            f"a store in DAOS is daos://POOL/CONTAINER without options, got {address!r}"
        )
    return pool, container
