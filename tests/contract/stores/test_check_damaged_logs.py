"""A check of a store whose records and objects were damaged, in a folder and in S3."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from objectcache_schemas.operators.engine_status import CheckReport
from objectcache_storage_server.engines.shared.engine import SharedEngine
from objectcache_storage_server.engines.shared.log.keep_checkpoints import CheckpointRule
from objectcache_storage_server.engines.stores.folder.folder_store import FolderStore
from objectcache_storage_server.engines.stores.s3.s3_store import S3Store
from objectcache_storage_server.engines.stores.shared_store import SharedStore
from tests.contract.engine_suite import BUCKET, content, put
from tests.contract.opened_engines.shared_engines import open_server
from tests.contract.stores.shared_stores import settings_of_bucket
from tests.s3_clients import boto3_client

SIZE_BYTES = 10_000


@dataclass(frozen=True)
class Damaging:
    """A store, and what is done to it behind its back, to a record or an object by its name."""

    open: Callable[[], SharedStore]
    read: Callable[[str], bytes]
    write: Callable[[str, bytes | None], None]  # None removes

    def flip(self, name: str) -> None:
        data = bytearray(self.read(name))
        data[len(data) // 2] ^= 1
        self.write(name, bytes(data))


@contextmanager
def _in_folder(folder: Path) -> Iterator[Damaging]:
    root = folder / "store"

    def path(name: str) -> Path:
        if name.startswith("log/"):
            return root / name
        return next(root.glob(f"objects/*/{name.replace('/', '=')}"))

    def write(name: str, data: bytes | None) -> None:
        if data is None:
            path(name).unlink()
        else:
            path(name).write_bytes(data)

    yield Damaging(
        lambda: FolderStore(root, create=True), lambda name: path(name).read_bytes(), write
    )


@contextmanager
def _in_s3(request: pytest.FixtureRequest) -> Iterator[Damaging]:
    server = request.getfixturevalue("seaweedfs")
    with settings_of_bucket(server) as (settings, _):
        client = boto3_client(
            endpoint_url=server.endpoint,
            aws_access_key_id=settings.access_key_id,
            aws_secret_access_key=settings.secret_access_key,
            region_name=settings.region,
        )

        def place(name: str) -> dict[str, str]:
            key = name if name.startswith("log/") else f"o/{name}"
            return {"Bucket": settings.bucket, "Key": settings.key(key)}

        def write(name: str, data: bytes | None) -> None:
            if data is None:
                client.delete_object(**place(name))
            else:
                client.put_object(**place(name), Body=data)

        with contextlib.closing(client):
            yield Damaging(
                lambda: S3Store(settings, create=True),
                lambda name: bytes(client.get_object(**place(name))["Body"].read()),
                write,
            )


@pytest.fixture(params=["folder", "seaweedfs"])
def damaging(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Damaging]:
    place: AbstractContextManager[Damaging] = (
        _in_folder(tmp_path) if request.param == "folder" else _in_s3(request)
    )
    with place as opened:
        yield opened


def check(engine: SharedEngine) -> CheckReport:
    return engine.check(False, lambda report: True)


def record(number: int) -> str:
    return f"log/{number:020d}"


def test_damaged_and_lost_records_and_objects_are_all_named(
    damaging: Damaging, tmp_path: Path
) -> None:
    engine = open_server(
        damaging.open(),
        tmp_path / "index",
        round_s=None,
        heartbeat_s=3600.0,
        checkpoint_rule=CheckpointRule(records=4, records_kept=0),
    )
    with contextlib.closing(engine):
        engine.create_bucket(BUCKET)
        for number in range(12):
            put(engine, f"{number}", content(number, SIZE_BYTES))
        engine.upkeep.round()  # it takes the lease, and a checkpoint
        with engine.catalog.reading() as view:
            state = view.state
            found = view.versions(view.bucket(BUCKET.name).number, ["3", "5", "7"])
        assert state.checkpoint is not None
        report = check(engine)
        assert (report.objects, report.damaged, report.misplaced) == (12, 0, 0)
        assert (report.log_records, report.bad_log_records) == (state.end, 0)
        damaging.flip(record(4))
        damaging.write(record(6), None)
        damaging.write(record(7), None)
        damaging.write(record(10), b"none of ours")
        lost, short, bent = (found[key].extents[0].object_name(0) for key in ("3", "5", "7"))
        damaging.write(lost, None)
        damaging.write(short, content(5, SIZE_BYTES)[:-1])
        damaging.flip(bent)
        names = list(engine.store.list_objects("checkpoint/", engine.deadline_s()))
        damaging.flip(min(each.name for each in names))
        report = check(engine)
        assert (report.damaged, report.misplaced, report.bad_log_records) == (3, 1, 5)
        assert report.log_records == state.end - 2
        words = "\n".join(report.examples)
        for part in (
            "record 4 of the store's log does not match its checksum",
            "records 6 to 7 of the log are not there",
            "record 10 of the store's log is none of ObjectCache's",
            "a checkpoint cannot be read: checkpoint/",
            f"{short}: it has {SIZE_BYTES - 1} bytes instead of {SIZE_BYTES}",
            "key '3'",
            "key '5'",
            "key '7'",
        ):
            assert part in words, words
