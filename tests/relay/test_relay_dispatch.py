"""A relay and the dispatch service: real processes, which come and go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.dispatch_service.running import TOKEN, DispatchProcess, lasting_address
from tests.integration.served import wait_until
from tests.relay.relays import (
    BUCKET,
    CHUNKS,
    LAYOUT,
    PAYLOAD_BYTES,
    SLOW_BYTES_PER_S,
    TOKENS,
    RunningRelay,
    check_get,
)
from tests.routes.answers.false_service import DEEP, NO_TEXT, false_service
from tests.servers import Credentials, RunningServer


def told(dispatch: DispatchProcess | str, folder: Path) -> tuple[str, ...]:
    """Settings of a relay that is node d0."""
    url = dispatch if isinstance(dispatch, str) else dispatch.url
    return (
        f"relay.dispatch={url}",
        f"relay.dispatch_token_file={folder / 'token'}",
        "relay.node=d0",
        "relay.storage_nic_gbps=8",
        "relay.compute_nic_gbps=80",
        "relay.report_s=0.05",
        "relay.metrics_listen=127.0.0.1:0",
    )


def nodes(dispatch: DispatchProcess) -> dict[str, Any]:
    return {node["name"]: node for node in dispatch.state()["nodes"]}


def has_relay(dispatch: DispatchProcess, relay: RunningRelay) -> bool:
    found = nodes(dispatch).get("d0")
    return found is not None and found["relay"] == relay.endpoint


def test_a_relay_registers_reports_and_takes_its_leave_and_workers_stay(
    server: RunningServer, tmp_path: Path
) -> None:
    any_age = "dispatch.report_age_s_max=0"  # a busy machine may keep the relay from reporting
    dispatch = DispatchProcess(tmp_path, "dispatch.node_lease_s=4", any_age)
    try:
        with (
            RunningRelay(server, tmp_path / "relay.log", *told(dispatch, tmp_path)) as relay,
            relay.client() as client,
        ):
            wait_until(lambda: has_relay(dispatch, relay), "it has registered")
            dispatch.register("d0", "decode", landing_bytes=0, lease_s=600.0)
            dispatch.register("p0", "prefill", lease_s=600.0)
            node = nodes(dispatch)["d0"]
            assert node["landing_bytes"] == 1 << 30
            assert (node["storage_nic_bytes_per_s"], len(node["workers"])) == (1e9, 1)
            bucket = client.kv_bucket(BUCKET, LAYOUT)
            keys = bucket.chunk_keys(TOKENS)
            with bucket.fetch(
                keys, delivery="layerwise", rate_bytes_per_s=SLOW_BYTES_PER_S // 2
            ) as delivery:
                wait_until(
                    lambda: 0 < nodes(dispatch)["d0"]["read_queue_bytes"] < PAYLOAD_BYTES,
                    "its queue is known",
                )
                assert nodes(dispatch)["d0"]["landing_bytes_used"] >= PAYLOAD_BYTES
                assert np.array_equal(delivery.wait(), CHUNKS.transpose(1, 0, 2))
            wait_until(
                lambda: nodes(dispatch)["d0"]["landing_bytes_used"] == 0, "its memory is known"
            )
            dispatch.loads(nodes=[{"node": "p0", "read_queue_bytes": 10**12}])
            [part] = dispatch.select("r").document["parts"]
            assert (part["relay"], part["relay_url"]) == ("d0", relay.endpoint)
            reports = relay.samples()["dispatch_reports_total", "ok"]
            wait_until(
                lambda: relay.samples()["dispatch_reports_total", "ok"] > reports + 100,
                "it is past its lease, and has gone on reporting",
            )
            assert has_relay(dispatch, relay)
            assert relay.process.terminate() == 0
        left = nodes(dispatch)
        assert (left["d0"]["relay"], len(left["d0"]["workers"])) == (None, 1)
        assert "p0" in left
    finally:
        assert dispatch.process.terminate() == 0


def test_a_service_that_is_away_costs_a_line_in_the_log_and_is_told_again(
    server: RunningServer, tmp_path: Path
) -> None:
    dispatch = DispatchProcess(tmp_path, listen=lasting_address())
    log = tmp_path / "relay.log"
    try:
        with (
            RunningRelay(server, log, *told(dispatch, tmp_path)) as relay,
            relay.client() as client,
        ):
            wait_until(lambda: has_relay(dispatch, relay), "it has registered")
            dispatch.process.kill()
            failed = ("dispatch_reports_total", "failed")
            wait_until(lambda: relay.samples().get(failed, 0) >= 3, "it has noticed")
            check_get(client)
            assert log.read_text().count("is not told of this relay") == 1
            dispatch = DispatchProcess(tmp_path, listen=dispatch.address)
            wait_until(lambda: has_relay(dispatch, relay), "it has registered anew")
            wait_until(lambda: "answers again" in log.read_text(), "it says so")
    finally:
        assert dispatch.process.terminate() == 0


def test_two_relays_of_one_name_do_not_take_each_others_place(
    server: RunningServer, tmp_path: Path
) -> None:
    dispatch = DispatchProcess(tmp_path)
    log = tmp_path / "second.log"
    try:
        with RunningRelay(server, tmp_path / "first.log", *told(dispatch, tmp_path)) as first:
            wait_until(lambda: has_relay(dispatch, first), "the first has registered")
            with (
                RunningRelay(server, log, *told(dispatch, tmp_path)) as second,
                second.client() as client,
            ):
                failed = ("dispatch_reports_total", "failed")
                wait_until(lambda: second.samples().get(failed, 0) >= 2, "it was refused twice")
                check_get(client)
                assert has_relay(dispatch, first)
                assert log.read_text().count("give this one another name (relay.node)") == 1
                assert first.process.terminate() == 0
                wait_until(lambda: has_relay(dispatch, second), "the second has the name")
    finally:
        assert dispatch.process.terminate() == 0


def test_a_relay_whose_key_the_gateway_refuses_says_so_and_does_not_register(
    server: RunningServer, tmp_path: Path
) -> None:
    dispatch = DispatchProcess(tmp_path)
    log = tmp_path / "relay.log"
    wrong = Credentials(server.credentials.access_key, "not-the-secret")
    try:
        with RunningRelay(server, log, *told(dispatch, tmp_path), job=wrong):
            wait_until(lambda: "can serve nobody" in log.read_text(), "it says so")
            assert "SignatureDoesNotMatch" in log.read_text()
            assert nodes(dispatch) == {}
    finally:
        assert dispatch.process.terminate() == 0


def test_a_relay_that_cannot_say_what_it_is_does_not_start(
    server: RunningServer, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=r"relay\.dispatch_token_file must be"):
        RunningRelay(server, tmp_path / "relay.log", "relay.dispatch=http://127.0.0.1:1")


@pytest.mark.parametrize("answer", [NO_TEXT, DEEP])
def test_answers_of_a_service_that_make_no_sense_end_no_reports(
    server: RunningServer, tmp_path: Path, answer: bytes
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    with (
        false_service(lambda _, path: answer if path.startswith("/v1/") else b"") as url,
        RunningRelay(server, tmp_path / "relay.log", *told(url, tmp_path)) as relay,
        relay.client() as client,
    ):
        failed = ("dispatch_reports_total", "failed")
        wait_until(lambda: relay.samples().get(failed, 0) >= 3, "it has tried again")
        check_get(client)


def test_a_relay_whose_node_has_a_name_that_no_header_can_carry_does_not_start(
    server: RunningServer, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=r"relay\.node must be 1 to 128 letters"):
        RunningRelay(server, tmp_path / "relay.log", "relay.node=\u8282\u70b9")


def test_a_relay_over_whose_transport_nothing_can_land_says_so_and_is_not_registered(
    server: RunningServer, tmp_path: Path
) -> None:
    dispatch = DispatchProcess(tmp_path)  # the server has no verbs, nor have most machines
    log = tmp_path / "relay.log"
    try:
        with RunningRelay(server, log, *told(dispatch, tmp_path), "relay.transport=verbs"):
            wait_until(lambda: "this relay can serve nobody" in log.read_text(), "it says so")
            assert "relay.transport is verbs, over which nothing can land" in log.read_text()
            assert nodes(dispatch) == {}
    finally:
        assert dispatch.process.terminate() == 0
