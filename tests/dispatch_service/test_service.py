"""The service as a process: calls, refusals, leases, kills, replicas."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from tests.certificates import Authority
from tests.dispatch_service.conftest import Start
from tests.dispatch_service.running import (
    AUTHORIZED,
    TOKEN,
    DispatchProcess,
    lasting_address,
    request,
)
from tests.servers import ServerProcess

LONG = "dispatch.report_age_s_max=600"
WAIT_S = 60.0


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def pair(service: DispatchProcess) -> DispatchProcess:
    for name, role in (("p0", "prefill"), ("d0", "decode")):
        assert service.register(name, role).status == 200
    return service


def test_a_request_lives_from_select_to_complete(start: Start) -> None:
    service = pair(start(LONG))
    chosen = service.select("r")
    assert chosen.status == 200
    assert {key: chosen.document[key] for key in ("prefill", "decode_node", "route")} == {
        "prefill": "p0.0",
        "decode_node": "d0",
        "route": "direct",
    }
    assert service.tokens() == {"p0.0": 1000, "d0.0": 1000}
    for event in ("read_done", "renew", "prefill_done"):
        assert service.ask("POST", f"/v1/reservations/r/{event}").document["name"] == "r"
    assert service.tokens() == {"p0.0": 0, "d0.0": 1000}
    assert service.ask("POST", "/v1/reservations/r/complete").status == 204
    assert service.tokens() == {"p0.0": 0, "d0.0": 0}
    gone = service.ask("DELETE", "/v1/reservations/r")
    assert (gone.status, gone.code) == (404, "NoSuchEntity")
    assert service.metric('objectcache_dispatch_decisions_total{call="select",route="direct"}') == 1
    assert service.metric("objectcache_dispatch_decision_seconds_count") == 1
    assert service.metric("objectcache_dispatch_nic_imbalance_ratio") in (1.0, 2.0)  # by the clock
    assert service.metric('objectcache_dispatch_reservations_ended_total{how="completed"}') == 1


def test_a_router_that_picks_workers_asks_for_the_route_alone(start: Start) -> None:
    service = pair(start(LONG))
    service.loads(nodes=[{"node": "p0", "read_queue_bytes": 10**12}, {"node": "d0"}])
    picked = {**request("r"), "prefill": "p0.0", "decode": "d0.0"}
    assert service.ask("POST", "/v1/route", picked).document["route"] == "relay:d0"
    name = 'objectcache_dispatch_node_landing_bytes{node="d0",state="used"}'
    assert service.metric(name) == 32 * 10**6
    assert service.metric('objectcache_dispatch_node_read_queue_bytes{node="p0"}') > 5 * 10**11
    unknown = service.ask("POST", "/v1/route", {**picked, "name": "s", "decode": "d9.0"})
    assert (unknown.status, "decode worker 'd9.0'" in unknown.document["message"]) == (400, True)


def test_groups_fetch_what_was_submitted(start: Start) -> None:
    service = pair(start(LONG))
    waits = service.ask("POST", "/v1/submit", request("r"))
    assert (waits.status, waits.document["prefill"]) == (202, None)
    assert service.loads(fetch=["prefill"])["fetched"] == []
    [decided] = service.loads(fetch=["decode"])["fetched"]
    assert (decided["prefill"], decided["decode"]) == ("p0.0", "d0.0")
    assert service.loads(fetch=["prefill"])["fetched"] == [decided]
    assert service.metric('objectcache_dispatch_decisions_total{call="fetch",route="direct"}') == 1


def test_a_full_cluster_says_when_to_ask_again_and_why(start: Start) -> None:
    service = start("dispatch.beta_tokens=500", "dispatch.retry_after_s=7")
    none = service.select("r")
    assert (none.status, none.code, none.headers["retry-after"]) == (503, "SlowDown", "7")
    assert none.document["message"] == "no prefill worker is registered"
    service.register("p0", "prefill")
    assert service.select("r").document["message"] == "no decode worker is registered"
    service.register("d0", "decode")
    assert service.select("r").status == 200
    assert "dispatch.beta_tokens" in service.select("s").document["message"]
    assert service.ask("DELETE", "/v1/reservations/r").status == 204
    assert service.select("s").status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer "},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": f"Bearer {TOKEN[:-1]}"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": "Bearer \xff\xfe"},
    ],
)
def test_nobody_is_let_in_without_the_token(
    shared: DispatchProcess, headers: dict[str, str]
) -> None:
    bodies = [("GET", "/v1/state"), ("POST", "/v1/select"), ("GET", "/metrics")]
    answers = [shared.ask(method, path, headers=headers) for method, path in bodies]
    assert [(each.status, each.code) for each in answers] == [(401, "Unauthorized")] * 3
    assert answers[0].headers["www-authenticate"] == "Bearer"
    assert len({each.body for each in answers}) == 1
    assert shared.ask("GET", "/healthz", headers=headers).status == 200


SELECT = b'{"name":"r","cached_tokens":1,"new_tokens":1,"layer_bytes":1,"num_layers":1'


@pytest.mark.parametrize(
    ("path", "data", "words"),
    [
        ("/v1/select", b"", "truncated"),
        ("/v1/select", b"\x00\xff\xfe", "invalid"),
        ("/v1/select", b"[" * 100_000, "body"),
        ("/v1/select", b"{}", "name"),
        ("/v1/select", SELECT + b',"surprise":1}', "surprise"),
        ("/v1/select", SELECT + b',"compute_window_s":-1}', "compute_window_s"),
        ("/v1/select", SELECT + b',"compute_window_s":1e999}', "out of range"),
        ("/v1/select", SELECT + b',"tenant":"' + b"x" * 300 + b'"}', "256"),
        ("/v1/select", SELECT + b',"chunk_bytes":2}', "chunk_bytes"),
        ("/v1/select", SELECT.replace(b'"r"', b'"a/b"') + b"}", "name"),
        ("/v1/select", SELECT.replace(b'layers":1', b'layers":1.5') + b"}", "num_layers"),
        ("/v1/loads", b'{"nodes":[{"node":"n","age_s":4000}]}', "age_s"),
        ("/v1/loads", b'{"workers":[{"worker":"w","tok":-1}]}', "tok"),
        (
            "/v1/loads",
            b'{"nodes":[{"node":"a b"}]}',
            "body: Expected 1 to 128 letters, digits and any of _.:@=+~- - at `$.nodes[0].node`",
        ),
        (
            "/v1/loads",
            b'{"nodes":[{"node":"n","relay":"ftp://x"}]}',
            "body: Expected http://HOST:PORT or https://HOST:PORT - at `$.nodes[0].relay`",
        ),
        ("/v1/select", b" " * (1 << 20) + SELECT + b"}", "1048576 bytes"),
    ],
)
def test_what_cannot_be_is_refused_in_words(
    shared: DispatchProcess, path: str, data: bytes, words: str
) -> None:
    answer = shared.ask("POST", path, data=data)
    assert answer.status == 400
    assert words in answer.document["message"]


@pytest.mark.parametrize("name", ["a%20b", "%ff", "x" * 129, "%0a", "a%2Fb"])
def test_a_name_in_a_path_is_bounded(shared: DispatchProcess, name: str) -> None:
    node = {"storage_nic_bytes_per_s": 1e9, "compute_nic_bytes_per_s": 1e9}
    for method, path in (
        ("PUT", f"/v1/nodes/{name}"),
        ("DELETE", f"/v1/nodes/{name}"),
        ("POST", f"/v1/reservations/{name}/renew"),
    ):
        answer = shared.ask(method, path, node)
        assert (answer.status, "128 letters" in answer.document["message"]) == (400, True)


def test_no_relay_has_a_word_of_routes_for_a_name(shared: DispatchProcess) -> None:
    rates = {"storage_nic_bytes_per_s": 1e9, "compute_nic_bytes_per_s": 1e9}
    relay = {"relay": "http://10.0.0.7:7400", "landing_bytes": 1 << 20, **rates}
    for name in ("auto", "direct", "split", "fetcher"):
        answer = shared.ask("PUT", f"/v1/nodes/{name}/relay", relay)
        assert (answer.status, f"not be called '{name}'" in answer.document["message"]) == (
            400,
            True,
        )


def test_paths_methods_and_heads_that_are_none_are_refused(shared: DispatchProcess) -> None:
    service = shared
    missing = service.ask("GET", "/v2/state")
    assert (missing.status, "/v1/select" in missing.document["message"]) == (404, True)
    wrong = service.ask("PATCH", "/v1/state")
    assert (wrong.status, wrong.code, wrong.headers["allow"]) == (405, "MethodNotAllowed", "GET")
    host, _, port = service.address.partition(":")
    for garbage in (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"GET / HTTP/1.1\r\nA: " + b"x" * 99_999):
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as stranger:
            stranger.sendall(garbage)
            assert stranger.recv(64).startswith((b"HTTP/1.1 400", b"HTTP/1.0 400", b"HTTP/1.1 431"))
    assert service.ask("GET", "/healthz").status == 200


def test_nodes_that_cannot_be_are_refused(start: Start) -> None:
    service = pair(start("dispatch.nodes_max=2"))
    full = service.register("x")
    assert (full.status, full.code) == (409, "LimitExceeded")
    assert "dispatch.nodes_max" in full.document["message"]
    twice = service.register(
        "d0", workers=[{"name": "p0.0", "role": "decode", "group": "g", "kv_capacity_tokens": 1}]
    )
    assert (twice.status, "'p0.0' is there twice" in twice.document["message"]) == (400, True)
    slow = service.register("d0", "decode", storage_nic_bytes_per_s=-1)
    assert (slow.status, "storage_nic_bytes_per_s" in slow.document["message"]) == (400, True)
    assert service.ask("DELETE", "/v1/nodes/x").status == 404
    assert service.select("r").status == 200  # as before
    assert service.ask("DELETE", "/v1/nodes/d0").document["lost"] == ["r"]


def test_a_thousand_reservations_that_nobody_ends_are_released(start: Start) -> None:
    lease = "dispatch.node_lease_s=600"  # a thousand requests may take a busy machine a minute
    service = pair(start("dispatch.reservation_lease_s=0.5", "dispatch.beta_tokens=1e9", lease))

    async def leak() -> None:
        async with aiohttp.ClientSession(service.url, headers=AUTHORIZED) as session:
            for number in range(1000):
                body = {**request(f"leak-{number}"), "layer_bytes": 0, "new_tokens": 1}
                body["cached_tokens"] = 0
                async with session.post("/v1/select", json=body) as response:
                    assert response.status == 200, await response.text()

    asyncio.run(leak())
    until(lambda: service.state()["reservations"] == 0)
    ended = 'objectcache_dispatch_reservations_ended_total{how="expired"}'
    assert service.metric(ended) == 1000
    assert service.tokens() == {"p0.0": 0, "d0.0": 0}


def test_a_node_that_is_silent_is_lost_and_one_that_reports_is_not(start: Start) -> None:
    service = start("dispatch.node_lease_s=1")
    service.register("d0", "decode", lease_s=600)
    service.register("x", lease_s=600)

    def is_chosen() -> bool:
        """A busy machine may let the short lease end before it is used."""
        service.register("p0", "prefill")
        return service.select("r").status == 200

    def lease_left_s() -> float:
        [left_s] = [n["lease_left_s"] for n in service.state()["nodes"] if n["name"] == "d0"]
        return float(left_s)

    def is_renewed() -> bool:
        before_s = lease_left_s()
        service.loads(nodes=[{"node": "d0"}])
        return lease_left_s() > before_s

    until(is_chosen)
    until(is_renewed)
    until(lambda: [node["name"] for node in service.state()["nodes"]] == ["d0", "x"])
    assert service.metric('objectcache_dispatch_nodes_ended_total{how="expired"}') >= 1
    assert service.metric('objectcache_dispatch_reservations_ended_total{how="lost"}') == 1
    assert service.ask("POST", "/v1/reservations/r/renew").status == 404
    assert service.loads(nodes=[{"node": "p0"}], workers=[{"worker": "p0.0"}])["unknown"] == [
        "p0",
        "p0.0",
    ]


def one_round(service: DispatchProcess, *, d0: int, d1: int) -> None:
    """What every node's agent does again and again; `d0` and `d1` are what runs there."""
    told = service.loads(nodes=[{"node": node} for node in ("p0", "d0", "d1")])
    for node in told["unknown"]:
        assert service.register(node, "prefill" if node == "p0" else "decode").status == 200
    loads = {"d0.0": d0, "d1.0": d1}
    service.loads(
        nodes=[{"node": node} for node in ("p0", "d0", "d1")],
        workers=[{"worker": name, "seq": 1, "tok": tok} for name, tok in loads.items()],
    )


def test_a_service_that_was_killed_knows_all_after_a_round_of_reports(start: Start) -> None:
    service = start(LONG, listen=lasting_address())
    one_round(service, d0=5000, d1=0)
    assert service.select("r").document["decode"] == "d1.0"
    before = service.tokens()
    service.process.kill()
    again = start(LONG, listen=service.address)
    assert again.state()["nodes"] == []
    assert again.ask("POST", "/v1/reservations/r/renew").status == 404
    one_round(again, d0=5000, d1=1000)  # r runs on d1
    assert again.tokens() == {**before, "p0.0": 0}
    assert again.select("s").document["decode"] == "d1.0"


def test_replicas_count_each_others_reservations_once_they_are_reported(start: Start) -> None:
    first, second = start(LONG), start(LONG)
    for each in (first, second):
        one_round(each, d0=0, d1=0)
    assert first.select("big", cached_tokens=8000).document["decode"] == "d0.0"
    assert first.select("small").document["decode"] == "d1.0"
    assert second.select("unaware").document["decode"] == "d0.0"  # it knows of neither
    assert second.ask("DELETE", "/v1/reservations/unaware").status == 204
    for each in (first, second):
        one_round(each, d0=8100, d1=1000)
    assert second.tokens() == {"p0.0": 0, "d0.0": 8100, "d1.0": 1000}
    assert second.select("aware").document["decode"] == "d1.0"
    assert first.tokens()["d0.0"] == 8100  # its own is not counted twice


def test_listed_nodes_have_no_lease_and_change_in_their_file_alone(
    start: Start, tmp_path: Path
) -> None:
    file = tmp_path / "topology.toml"
    file.write_text(
        '[[nodes]]\nname = "p0"\nstorage_nic_bytes_per_s = 1e9\ncompute_nic_bytes_per_s = 1e9\n'
        '[[nodes.workers]]\nname = "p0.0"\nrole = "prefill"\ngroup = "prefill"\n'
    )
    service = start(f"dispatch.topology={file}", "dispatch.decode=false")
    assert service.state()["nodes"][0]["lease_left_s"] is None
    assert service.register("p0", "prefill").status == 409
    assert service.ask("DELETE", "/v1/nodes/p0").status == 409
    chosen = service.select("r").document
    assert (chosen["prefill"], chosen["decode"]) == ("p0.0", None)
    service.loads(nodes=[{"node": "p0", "is_alive": False}])
    assert service.metric('objectcache_dispatch_node_alive{node="p0"}') == 0
    assert service.select("s").status == 503


def refusal(folder: Path, *arguments: str) -> str:
    log = folder / "refused.log"
    process = ServerProcess("objectcache_gateway.dispatch_service", arguments, log)
    assert process.wait() == 2
    return log.read_text()


def test_it_does_not_start_open_to_all_by_an_oversight(tmp_path: Path, start: Start) -> None:
    assert "dispatch.token_file is not set" in refusal(tmp_path)
    file = tmp_path / "token"
    file.write_text("short")
    file.chmod(0o600)
    assert "16 to 256 visible" in refusal(tmp_path, "--token-file", str(file))
    file.write_text(TOKEN)
    file.chmod(0o644)
    assert "chmod 600" in refusal(tmp_path, "--token-file", str(file))
    topology = tmp_path / "t.toml"
    topology.write_text('[[nodes]]\nname = "p0"\n')
    file.chmod(0o600)
    wrong = refusal(tmp_path, "--token-file", str(file), "--topology", str(topology))
    assert "storage_nic_bytes_per_s" in wrong


def test_anybody_is_let_in_where_that_was_asked_for(tmp_path: Path) -> None:
    service = ServerProcess(
        "objectcache_gateway.dispatch_service",
        ["--listen", "0.0.0.0:0", "--set", "dispatch.anonymous=true"],
        tmp_path / "log",
    )
    try:
        url = service.wait_ready().replace("0.0.0.0", "127.0.0.1")
        assert (
            "may register nodes and relays, and so steer routes" in (tmp_path / "log").read_text()
        )

        async def ask() -> int:
            async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/state") as found:
                return found.status

        assert asyncio.run(ask()) == 200
    finally:
        assert service.terminate() == 0


def test_it_serves_https_where_it_has_a_certificate(start: Start, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    files = authority.pair("dispatch")
    service = start(
        f"dispatch.tls_certificate={files.certificate}", f"dispatch.tls_key={files.key}"
    )
    assert service.url.startswith("https://")
    trusted = ssl.create_default_context(cafile=str(authority.file))

    async def ask() -> int:
        async with (
            aiohttp.ClientSession(headers=AUTHORIZED) as session,
            session.get(f"{service.url}/v1/state", ssl=trusted) as found,
        ):
            return found.status

    assert asyncio.run(ask()) == 200
