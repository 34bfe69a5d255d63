"""SGLang's linker and device pool, and a forward that takes its time: what the server is told."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines import sglang_on_cpu
from tests.engines.delivery_traces import NewTraces
from tests.engines.test_sglang_linker import (
    LAYERS,
    PAGE,
    hashes,
    linker_of,
    offload,
    pool_of,
    slots,
    transfer,
)
from tests.engines.virtual_clock import VirtualClock
from tests.servers import RunningServer

sglang_on_cpu.prepare()

BUCKET = "linked"
WITHIN = 0.05  # of what is fitted to other forwards
PROMPT_PAGES = 20


def forward(clock: VirtualClock, pool: Any, linker: Any, index: int, layer_s: float) -> None:
    """A forward as SGLang's worker runs it: attention takes K and V from the pool, which waits for
    them.
    """
    linker.layer_done_counter.set_consumer(index)
    for layer in range(LAYERS):
        pool.get_kv_buffer(layer)
        clock.sleep(layer_s)
    linker.finish_layer_wise_loading(index)


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_a_load_has_the_window_of_its_forward_and_reports_what_it_took(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    clock = VirtualClock(monkeypatch)
    pool = pool_of(kind)
    linker = linker_of(server, pool, f"org/windows-{kind}")
    keys = hashes(f"w{kind}", PROMPT_PAGES)
    assert offload(linker, keys[:8], slots(*range(8)))
    traces = NewTraces(server, BUCKET)
    took_s: list[float] = []
    for number in range(6):
        pages = (8, 5, 7, 6, 4, 8)[number]
        rid = f"r{number}"
        linker.lookup(rid, transfer(keys))
        assert linker.load(rid, transfer(keys[:pages], slots(*range(10, 10 + pages))))
        index = linker.start_layer_wise_loading()
        computed = (PROMPT_PAGES - pages) * PAGE + PAGE // 2
        took_s.append(0.060 + 0.000_6 * computed)
        forward(clock, pool, linker, index, took_s[-1])
        forward(clock, pool, linker, -1, 0.001)  # of a batch that loads nothing
    consumed = traces.all_consumed(6)
    assert {trace.window_source for trace in consumed[:2]} <= {"none", "learned"}
    for trace, layer_s in list(zip(consumed, took_s, strict=True))[2:]:
        assert trace.window_source == "descriptor"
        assert trace.compute_window_s == pytest.approx(layer_s, rel=WITHIN)
        assert trace.reported_window_s == pytest.approx(layer_s)
    linker.close()
