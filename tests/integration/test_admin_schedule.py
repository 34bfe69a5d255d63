"""`objectcache admin schedule` against servers as a user starts them."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from typer.testing import Result

from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from objectcache_schemas.errors import Busy, Unavailable
from objectcache_schemas.limits import MIB
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.kv import DeliveryAccepted, KvGet
from objectcache_schemas.messages.reads import CloseObject, ObjectOpened, OpenObject, SendBody
from tests.admin_server import AdminServed
from tests.integration.served import BOUND_S, own_environment, wait_until
from tests.s3_clients import boto3_client
from tests.servers import ServerProcess
from tests.storage_client import StorageClient

BUCKET, KEY = "shared", "object"
BODY = os.urandom(8 * MIB)


@pytest.fixture(autouse=True)
def _no_settings_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OBJECTCACHE")]:
        monkeypatch.delenv(name)


class Operated(AdminServed):
    """A storage server, a gateway and the admin API, and `objectcache admin schedule` on them."""

    def __init__(self, data_dir: Path, *settings: str) -> None:
        super().__init__(data_dir, *settings)
        try:
            log = data_dir / "gateway.log"
            self.gateway = ServerProcess("objectcache_gateway", self.flags, log)
            self.endpoint = self.gateway.wait_ready()
        except BaseException:
            super().__exit__()
            raise

    def schedule(self, *arguments: str) -> Result:
        return self.admin("schedule", *arguments)

    def s3(self) -> Any:
        """A boto3 client that neither retries nor waits long."""
        access_key, secret_key = self.root_key
        return boto3_client(
            endpoint_url=self.endpoint,
            aws_access_key_id=access_key,
            aws_secret_access_key=secret_key,
            region_name="us-east-1",
            config=Config(retries={"total_max_attempts": 1}, read_timeout=BOUND_S),
        )

    def state(self, *arguments: str) -> Any:
        """What a command prints with --json."""
        result = self.schedule(*arguments, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    def store(self) -> None:
        with self.connect() as client:
            client.create_bucket(BUCKET)
            client.put(BUCKET, KEY, BODY)

    def stop(self) -> int:
        """SIGTERM to all; the storage server's exit code."""
        self.gateway.terminate()
        self.api.terminate()
        return self.storage.terminate()

    def __exit__(self, *exception: object) -> None:
        if self.gateway.returncode is None:
            self.gateway.terminate()
        super().__exit__(*exception)


@pytest.fixture(scope="module")
def operated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    with Operated(tmp_path_factory.mktemp("operated") / "data") as server:
        server.store()
        yield server


@pytest.fixture
def served(operated: Operated) -> Iterator[Operated]:
    """A server whose schedule is as it was at the start, and which delivers nothing."""
    yield operated
    assert operated.state("reset")["changes"] == {}
    wait_until(lambda: operated.state("show")["delivery_count"] == 0, "all deliveries to end")


def hold_delivery(server: Operated, tenant: str) -> StorageClient:
    """A connection whose delivery is let in, and whose body nobody takes until it is closed."""
    client = server.connect()
    client.ask(OpenObject(bucket=BUCKET, key=KEY, identity=tenant), ObjectOpened)
    client.send(SendBody(offset_bytes=0, length_bytes=len(BODY), into_socket=False))
    assert client.receive_bytes(1) == BODY[:1]
    return client


def test_changes_are_in_force_at_once_and_after_a_restart(tmp_path: Path) -> None:
    with Operated(tmp_path / "data", "scheduler.margin_gbps=3") as server:
        assert server.state("show")["configuration"]["policy"] == "stall_dynamic"
        server.schedule("set-policy", "calibrated_stall_opt")
        server.schedule("set-cap", "50Gbps")
        server.schedule("set-epoch", "20ms")
        server.schedule("set-threshold", "512MiB")
        before = server.state("tenant", "acme", "--weight", "2", "--cap", "10Gbps")
        assert before["configuration"] == {
            "policy": "calibrated_stall_opt",
            "cap_gbps": 50.0,
            "margin_gbps": 3.0,
            "epoch_s": 0.02,
            "rates": "every_epoch",
            "layerwise_threshold_bytes": 512 * MIB,
            "tenants": {"acme": {"weight": 2.0, "cap_gbps": 10.0, "deliveries_max": 0}},
        }
        assert server.stop() == 0
    with Operated(tmp_path / "data", "scheduler.margin_gbps=4") as server:
        after = server.state("show")["configuration"]
        assert after == before["configuration"] | {"margin_gbps": 4.0}
        assert server.state("reset")["changes"] == {}


def test_a_delivery_under_a_small_cap_is_shown_and_goes_on_when_the_cap_is_lifted(
    served: Operated,
) -> None:
    served.schedule("set-cap", "4Mbps")  # 16 s for the whole
    s3, bodies = served.s3(), list[bytes]()

    def fetch() -> None:
        bodies.append(s3.get_object(Bucket=BUCKET, Key=KEY)["Body"].read())

    fetching = threading.Thread(target=fetch)
    fetching.start()
    try:
        wait_until(lambda: served.state("show")["delivery_count"] == 1, "the delivery")
        (shown,) = served.state("show")["deliveries"]
        assert shown["tenant"] == "root"
        assert shown["payload_bytes"] == len(BODY)
        assert not shown["pooled"]
        served.schedule("set-policy", "equal")
        served.schedule("set-cap", "none")
    finally:
        fetching.join(BOUND_S)
        s3.close()
    assert bodies == [BODY]
    wait_until(lambda: served.state("show")["delivery_count"] == 0, "its end")


def test_a_layerwise_delivery_is_shown_with_its_window_and_the_nic_that_it_goes_to(
    tmp_path: Path,
) -> None:
    layers, slice_bytes = 8, MIB
    descriptor = Descriptor(("chunk",), layers, 16, slice_bytes, DeliveryMode.LAYERWISE)
    asked = dataclasses.replace(
        descriptor, compute_window_s=0.0088, nic="node7", nic_bytes_per_s=1e9
    )
    request = KvGet(
        bucket=BUCKET, identity="acme", request_id="request-1", descriptor=asked.to_bytes()
    )
    with (  # a part of it is read before its client takes any
        Operated(tmp_path / "data", "storage.delivery_in_flight_bytes_max=1048576") as server,
        server.connect() as client,
    ):
        client.create_bucket(BUCKET)
        client.kv_put(BUCKET, descriptor.to_bytes(), BODY)
        client.ask(request, DeliveryAccepted)

        def queued_bytes() -> int:
            (nic,) = server.state("show")["nics"]
            return int(nic["queued_bytes"])

        wait_until(lambda: queued_bytes() < len(BODY), "a part of it to be sent")
        (shown,) = server.state("show")["deliveries"]
        assert (shown["request_id"], shown["tenant"]) == ("request-1", "acme")
        assert shown["pooled"]
        assert (shown["compute_window_s"], shown["window_source"]) == (0.0088, "descriptor")
        assert (shown["layer_bytes"], shown["num_layers"]) == (slice_bytes, layers)
        printed = " ".join(server.schedule("show").stdout.split())
        assert "request-1 acme node7 8.8ms told" in printed
        (nic,) = server.state("show")["nics"]
        assert (nic["nic"], nic["tenant"], nic["nic_bytes_per_s"]) == ("node7", "acme", 1e9)
        assert nic["deliveries"] == 1
        assert nic["queued_bytes"] > 0
        assert "node7 acme 8 Gbps" in printed
        client.ask(CloseObject(), Done)
        assert server.state("show")["delivery_count"] == 0


def test_a_tenant_at_its_bound_waits_until_the_bound_is_lifted(served: Operated) -> None:
    served.schedule("tenant", "acme", "--deliveries-max", "1")
    with hold_delivery(served, "acme"), served.connect() as second:
        second.send(OpenObject(bucket=BUCKET, key=KEY, identity="acme"))
        wait_until(lambda: served.state("show")["waiting"] == 1, "the second to wait")
        hold_delivery(served, "other").close()  # another tenant is not held up
        served.schedule("tenant", "acme", "--deliveries-max", "2")
        second.reply(ObjectOpened)
        assert served.state("show")["waiting"] == 0


def test_a_waiting_request_begins_when_a_delivery_ends_and_leaves_when_its_gateway_does(
    served: Operated,
) -> None:
    served.schedule("tenant", "acme", "--deliveries-max", "1")
    with hold_delivery(served, "acme") as first, served.connect() as third:
        second = served.connect()
        for client in (second, third):
            client.send(OpenObject(bucket=BUCKET, key=KEY, identity="acme"))
        wait_until(lambda: served.state("show")["waiting"] == 2, "both to wait")
        second.close()
        wait_until(lambda: served.state("show")["waiting"] == 1, "one to leave")
        first.close()
        third.reply(ObjectOpened)


def test_a_full_queue_is_slow_down_with_retry_after(tmp_path: Path) -> None:
    settings = ("scheduler.queue_max=0", "scheduler.tenant_deliveries_max=1")
    with Operated(tmp_path / "data", *settings) as server:
        server.store()
        s3 = server.s3()
        with hold_delivery(server, "root"), pytest.raises(ClientError) as caught:
            s3.get_object(Bucket=BUCKET, Key=KEY)
        s3.close()
    answer = caught.value.response
    assert answer["Error"]["Code"] == "SlowDown"
    assert "scheduler.tenant_deliveries_max is 1" in answer["Error"]["Message"]
    assert 1 <= int(answer["ResponseMetadata"]["HTTPHeaders"]["retry-after"]) <= 30


def test_a_wait_that_is_too_long_is_slow_down(tmp_path: Path) -> None:
    settings = ("scheduler.queue_timeout_s=0.05", "scheduler.tenant_deliveries_max=1")
    with Operated(tmp_path / "data", *settings) as server:
        server.store()
        with (
            hold_delivery(server, "root"),
            server.connect() as second,
            pytest.raises(Busy, match=r"scheduler\.queue_timeout_s"),
        ):
            second.ask(OpenObject(bucket=BUCKET, key=KEY, identity="root"), ObjectOpened)


def test_whoever_waits_when_the_server_stops_is_told_so(tmp_path: Path) -> None:
    with Operated(tmp_path / "data", "scheduler.tenant_deliveries_max=1") as server:
        server.store()
        with hold_delivery(server, "root"), server.connect() as second:
            second.send(OpenObject(bucket=BUCKET, key=KEY, identity="root"))
            wait_until(lambda: server.state("show")["waiting"] == 1, "the second to wait")
            server.storage.signal_stop()
            with pytest.raises(Unavailable, match="the storage server is stopping"):
                second.reply(ObjectOpened)
        assert server.storage.wait() == 0


def test_a_server_does_not_start_with_a_broken_file_and_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "schedule.json").write_text('{"cap_gbps": -1}')
    ended = subprocess.run(
        [sys.executable, "-m", "objectcache_storage_server", "--data-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        env=own_environment(),
        timeout=BOUND_S,
        check=False,
    )
    assert ended.returncode == 2
    assert f"{tmp_path / 'schedule.json'} cannot be read as a changed schedule" in ended.stderr
    assert "$.cap_gbps`; mend that, or delete the file" in ended.stderr
