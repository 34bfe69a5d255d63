"""What clients ask of the service again and again: which relays there are."""

from __future__ import annotations

from tests.dispatch_service.conftest import Start
from tests.dispatch_service.running import AUTHORIZED, DispatchProcess

RATES = {"storage_nic_bytes_per_s": 1e9, "compute_nic_bytes_per_s": 1e10, "landing_bytes": 10**9}


def add_relay(service: DispatchProcess, node: str, url: str) -> None:
    assert service.ask("PUT", f"/v1/nodes/{node}/relay", {"relay": url, **RATES}).status == 200


def test_relays_are_listed_by_name_and_a_list_that_is_known_is_not_sent_again(
    start: Start,
) -> None:
    service = start()
    service.register("p0", "prefill")
    add_relay(service, "d1", "http://d1:7400")
    add_relay(service, "d0", "http://d0:7400")
    listed = service.ask("GET", "/v1/relays")
    both = [{"name": f"d{n}", "relay": f"http://d{n}:7400"} for n in range(2)]
    assert listed.document == {"relays": both}
    tag = listed.headers["etag"]

    def asked_again(known: str) -> int:
        answer = service.ask("GET", "/v1/relays", headers={**AUTHORIZED, "If-None-Match": known})
        assert (answer.status == 304) == (answer.body == b"")
        return answer.status

    assert asked_again(tag) == asked_again(f'"another", W/{tag}') == 304
    assert asked_again('"another"') == 200
    service.loads(nodes=[{"node": "d0", "read_queue_bytes": 10**9}])
    assert asked_again(tag) == 304
    service.loads(nodes=[{"node": "d0", "is_alive": False}])
    assert asked_again(tag) == 200
    assert service.ask("GET", "/v1/relays").document == {"relays": both[1:]}
    service.loads(nodes=[{"node": "d0"}])
    assert asked_again(tag) == 304
    add_relay(service, "d2", "http://d2:7400")
    assert asked_again(tag) == 200
    asked = 'objectcache_dispatch_requests_total{method="GET",path="/v1/relays"}'
    assert service.metric(asked) == 9
