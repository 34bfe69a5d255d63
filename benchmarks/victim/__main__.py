"""What a tenant notices while others attack: `python -m benchmarks.victim`.

A server with its default settings, a victim that sends one small request after another of each
kind, and attacks by turns. A row is a kind of request under an attack: its latency to the last
byte, and how many were refused or lost.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.basis.server import Server, running_server
from benchmarks.basis.storage_socket import StorageSocket
from benchmarks.victim.attacks import ATTACKS as STORAGE_ATTACKS
from benchmarks.victim.attacks import Attack
from benchmarks.victim.connection_attacks import CONNECTION_ATTACKS
from benchmarks.victim.signed_http import Answered, Asker, Signer
from objectcache_schemas import headers
from objectcache_schemas.accounts import AccessKey, PutKey, PutUser, User
from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from objectcache_schemas.limits import KIB, MIB
from objectcache_schemas.operators.account_changes import AccountsChanged, ChangeAccounts

ATTACKS = STORAGE_ATTACKS | CONNECTION_ATTACKS
SMALL_BYTES = 4 * KIB
BODY_BYTES = 1 * MIB  # more than a gateway takes into its own hands
CHUNKS, LAYERS, SLICE_BYTES = 8, 8, 16 * KIB
LARGE_BYTES = 16 * MIB  # of what attackers read
TIMEOUT_S = 30.0
PAUSE_S = 0.02  # between two requests of a kind, so that the victim is no load itself
UNDER_WAY_S = 3.0  # until an attack is


def new_user(server: Server, name: str) -> Signer:
    """A user with one key pair and a bucket of its own name."""
    name = f"{name}-{secrets.token_hex(4)}"
    key = AccessKey(name, secrets.token_urlsafe(20), user=name, created_s=time.time())
    with closing(StorageSocket(server.settings)) as storage:
        user = User(name=name, created_s=time.time())
        for change in (PutUser(user=user, create=True), PutKey(key=key, create=True)):
            storage.ask(ChangeAccounts(change=change), AccountsChanged)
    signer = Signer(server.endpoint, key.access_key, key.secret_key)
    _must(Asker(signer, TIMEOUT_S).ask("PUT", f"/{name}"))
    return signer


def new_attacker(server: Server) -> tuple[Signer, str]:
    """A user, and the path of a large object in its bucket."""
    signer = new_user(server, "attacker")
    path = f"/{signer.access_key}/large"
    _must(Asker(signer, TIMEOUT_S).ask("PUT", path, os.urandom(LARGE_BYTES)))
    return signer, path


def _must(answered: Answered) -> None:
    if answered.status != 200:
        raise SystemExit(f"the benchmark could not be prepared: HTTP status {answered.status}")


@dataclass(slots=True)
class Timed:
    """The requests of one kind."""

    durations_s: list[float] = field(default_factory=list)
    refused: int = 0

    def add(self, answered: Answered) -> None:
        """Count one."""
        self.durations_s.append(answered.duration_s)
        self.refused += answered.status != 200

    def percentile_s(self, percent: int) -> float:
        """Of all, also those that were refused."""
        ordered = sorted(self.durations_s)
        return ordered[len(ordered) * percent // 100]


Request = Callable[[Asker], Answered]


class Victim:
    """One tenant's requests, a thread for each kind."""

    def __init__(self, server: Server) -> None:
        self._signer = new_user(server, "victim")
        self._bucket = self._signer.access_key
        keys = tuple(f"chunk-{number}" for number in range(CHUNKS))
        asker = Asker(self._signer, TIMEOUT_S)
        for key in keys:
            _must(asker.ask("PUT", f"/{self._bucket}/{key}", os.urandom(LAYERS * SLICE_BYTES)))
        _must(asker.ask("PUT", f"/{self._bucket}/small", os.urandom(SMALL_BYTES)))
        _must(asker.ask("PUT", f"/{self._bucket}/body", os.urandom(BODY_BYTES)))
        asker.close()
        self._descriptor = Descriptor(keys, LAYERS, 16, SLICE_BYTES, DeliveryMode.LAYERWISE)

    def kinds(self) -> dict[str, tuple[bool, Request]]:
        """By name: whether its connection is kept, and the request."""
        bucket = self._bucket
        small, body = os.urandom(SMALL_BYTES), os.urandom(BODY_BYTES)
        named = {headers.DESCRIPTOR: self._descriptor.to_header()}
        last = f"/{bucket}/{self._descriptor.chunk_keys[-1]}"
        return {
            "GET of 4 KiB": (True, lambda asker: asker.ask("GET", f"/{bucket}/small")),
            "the same, new connection": (False, lambda asker: asker.ask("GET", f"/{bucket}/small")),
            "GET of 1 MiB": (True, lambda asker: asker.ask("GET", f"/{bucket}/body")),
            "delivery of 1 MiB": (True, lambda asker: asker.ask("GET", last, b"", named)),
            "PUT of 4 KiB": (True, lambda asker: asker.ask("PUT", f"/{bucket}/new", small)),
            "PUT of 1 MiB": (True, lambda asker: asker.ask("PUT", f"/{bucket}/big", body)),
        }

    def run(self, duration_s: float) -> dict[str, Timed]:
        """Send for so long."""
        end_s = time.monotonic() + duration_s
        found = {name: Timed() for name in self.kinds()}
        threads = [
            threading.Thread(target=self._repeat, args=(end_s, keeps, request, found[name]))
            for name, (keeps, request) in self.kinds().items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def _repeat(self, end_s: float, keeps: bool, request: Request, timed: Timed) -> None:
        asker = Asker(self._signer, TIMEOUT_S, keeps=keeps)
        while not timed.durations_s or time.monotonic() < end_s:
            timed.add(request(asker))
            time.sleep(PAUSE_S)
        asker.close()


def measure(server: Server, names: Sequence[str], duration_s: float) -> None:
    """Run the attacks by turns, and print a row for each kind of request."""
    print("| attack | request | count | refused | p50 | p99 |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    victim = Victim(server)
    for name in names:
        peers = ATTACKS[name](lambda: new_attacker(server))
        with Attack(peers) as attack:
            if peers:
                time.sleep(UNDER_WAY_S)
            found = victim.run(duration_s)
        for kind, timed in found.items():
            p50_ms, p99_ms = (1000 * timed.percentile_s(percent) for percent in (50, 99))
            count = len(timed.durations_s)
            print(f"| {name} | {kind} | {count} | {timed.refused} | {p50_ms:.1f} ms "
                  f"| {p99_ms:.1f} ms |", flush=True)  # fmt: skip
        if peers:
            print(
                f"{name}: {len(peers)} peers, refused or cut {attack.times_lost} times",
                file=sys.stderr,
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attack", action="append", choices=sorted(ATTACKS))
    parser.add_argument("--seconds", type=float, default=20.0, help="of the victim, an attack")
    parser.add_argument("--data-dir", type=Path, help="on which device; removed at the end")
    parser.add_argument("--set", action="append", default=[], help="a setting, section.key=value")
    given = parser.parse_args(arguments)
    with (
        tempfile.TemporaryDirectory(dir=given.data_dir, prefix="victim-") as folder,
        running_server(Path(folder) / "data", *given.set) as server,
    ):
        measure(server, given.attack or list(ATTACKS), given.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
