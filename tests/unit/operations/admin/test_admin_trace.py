"""`objectcache admin trace` against a storage server of this process, and its pictures."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from rich.console import Console

from objectcache_operations.admin.traces.layer_times import layer_times
from objectcache_operations.admin.traces.trace_svg import trace_svg
from objectcache_operations.admin.traces.trace_view import LAYER_ROWS_MAX, list_view, trace_view
from objectcache_runtime.settings import load_settings
from objectcache_schemas.errors import DeliveryFailed
from objectcache_schemas.operators.traces import DeliveryTrace, LayerTrace, TracePhase
from objectcache_storage_server.tracing.recorder import DeliveryRecorder
from tests.unit.operations.admin.test_admin_cli import OperatedEngine, ServerThread, admin

SVG = "{http://www.w3.org/2000/svg}"
TRACE = DeliveryTrace(
    request_id="0123456789ABCDEF",
    bucket="my-bucket",
    tenant="root",
    path="agg",
    transport="shared_memory",
    delivery="layerwise",
    policy="stall_dynamic",
    chunk_count=64,
    payload_bytes=3 << 20,
    compute_window_s=0.002,
    window_source="learned",
    rate_bytes_per_s=None,
    achieved_bytes_per_s=float(1 << 30),
    started_unix_s=1_800_000_000.0,
    duration_s=0.010,
    phases=tuple(
        TracePhase(name=name, seconds=seconds)
        for name, seconds in (
            ("client", 0.0),
            ("control_plane", 0.001),
            ("queue", 0.002),
            ("storage", 0.006),
            ("network", 0.001),
        )
    ),
    layers=(
        LayerTrace(layer=4, first_read_s=0.003, ready_s=0.005, consumed_s=0.007),
        LayerTrace(layer=5, first_read_s=0.004, ready_s=0.006, consumed_s=0.009),
        LayerTrace(layer=6, first_read_s=0.006, ready_s=0.010, consumed_s=None),
    ),
)


def printed(view: object, width: int = 100) -> str:
    output = io.StringIO()
    Console(file=output, width=width, highlight=False).print(view)
    return output.getvalue()


# --- what is shown ---


def test_the_gpu_waits_for_bytes_that_come_after_it_is_free() -> None:
    first, second, third = layer_times(TRACE.layers)
    assert (first.compute_start_s, first.wait_s) == (0.005, 0.005)
    assert (second.compute_start_s, second.wait_s) == (0.007, 0.0)
    assert third.compute_start_s == 0.010
    assert third.wait_s == pytest.approx(0.001)
    unknown = list(layer_times([TRACE.layers[2], TRACE.layers[0]]))
    assert (unknown[1].compute_start_s, unknown[1].wait_s) == (None, None)


def test_a_trace_has_a_bar_for_each_phase_and_a_row_for_each_layer() -> None:
    lines = printed(trace_view(TRACE)).splitlines()
    assert max(map(len, lines)) <= 80
    bars = {words[0]: words[1:] for words in map(str.split, lines) if words and words[-1] == "%"}
    assert bars["storage"] == ["#" * 24, "6ms", "60", "%"]
    assert bars["queue"] == ["#" * 8, "2ms", "20", "%"]
    assert bars["client"] == ["0", "0", "%"]
    assert lines[-2].split() == ["5", "4ms", "6ms", "9ms", "0"]
    assert lines[-1].split() == ["6", "6ms", "10ms", "-", "1ms"]
    words = " ".join(" ".join(lines).split())
    assert "agg over shared_memory, layerwise, policy stall_dynamic" in words
    assert "1.0 GiB/s achieved, none assigned" in words
    assert "2ms a layer (learned)" in words


def test_what_a_payload_is_decoded_stands_beside_what_was_sent() -> None:
    words = " ".join(printed(trace_view(TRACE)).split())
    assert "3.0 MiB of 64 chunks" in words
    encoded = msgspec.structs.replace(TRACE, decoded_bytes=9 << 19)
    words = " ".join(printed(trace_view(encoded)).split())
    assert "3.0 MiB for 4.5 MiB of 64 chunks" in words


def test_a_refused_request_shows_why_and_where_its_time_went() -> None:
    error = DeliveryFailed("no \x1b[31mrate").to_wire()
    refused = msgspec.structs.replace(TRACE, path="", layers=(), error=error)
    shown = printed(trace_view(refused))
    assert "DeliveryFailed in 10ms: no \\x1b[31mrate" in shown
    assert "policy" not in shown


def test_a_model_of_many_layers_does_not_fill_the_terminal() -> None:
    layers = tuple(
        LayerTrace(layer=number, first_read_s=None, ready_s=None, consumed_s=None)
        for number in range(LAYER_ROWS_MAX + 5)
    )
    shown = printed(trace_view(msgspec.structs.replace(TRACE, layers=layers)))
    assert "5 more; --json has them" in shown
    assert len(shown.splitlines()) < LAYER_ROWS_MAX + 20


def test_the_list_says_what_most_of_the_time_went_to() -> None:
    running = msgspec.structs.replace(TRACE, duration_s=None)
    lines = printed(list_view([TRACE, running]), width=160).splitlines()
    assert "0123456789ABCDEF" in lines[1]
    assert lines[1].split()[-3:] == ["10ms", "storage", "delivered"]
    assert lines[2].split()[-4:] == ["-", "storage", "under", "way"]
    assert "traces_kept" in printed(list_view([]))


# --- the picture ---


def test_the_picture_has_a_row_a_layer_on_one_time_axis() -> None:
    root = ElementTree.fromstring(trace_svg(TRACE))
    titles = [title.text or "" for title in root.iter(f"{SVG}title")]
    for fact in (
        "storage: 6.00 ms",
        "layer 4: read in 2.00 ms",
        "layer 4: 5.00 ms",
        "layer 5: computed in 2.00 ms",
        "layer 4: the GPU waited 5.00 ms",
    ):
        assert fact in titles
    assert not any("layer 6: computed" in title for title in titles)
    assert "ms" in [text.text for text in root.iter(f"{SVG}text")]
    width = float(root.attrib["width"])
    for bar in root.iter(f"{SVG}rect"):
        right = float(bar.attrib.get("x", 0)) + float(bar.attrib["width"])
        assert right <= width + 0.1


def test_names_in_a_picture_are_escaped() -> None:
    hostile = msgspec.structs.replace(
        TRACE, request_id="<script>&\x00\x1b", bucket='"</svg>', error=DeliveryFailed("x").to_wire()
    )
    root = ElementTree.fromstring(trace_svg(hostile))
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert "Request <script>&\\x00\\x1b" in texts
    assert any('"</svg>' in text for text in texts)


@pytest.mark.parametrize("layer_count", [0, 1, 80, 4096])
def test_a_picture_of_any_number_of_layers_is_well_formed(layer_count: int) -> None:
    layers = tuple(
        LayerTrace(layer=number, first_read_s=None, ready_s=None, consumed_s=None)
        for number in range(layer_count)
    )
    trace = msgspec.structs.replace(TRACE, layers=layers, duration_s=None, phases=())
    ElementTree.fromstring(trace_svg(trace))


# --- the command ---


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerThread]:
    monkeypatch.delenv("OBJECTCACHE_CONFIG", raising=False)
    assignments = [
        f"server.data_dir={tmp_path}",
        f"server.run_dir={tmp_path}",
        "scheduler.traces_kept=2",
    ]
    running = ServerThread(load_settings(None, {}, assignments), OperatedEngine())
    yield running
    running.stop()


def deliver(server: ServerThread, request_id: str) -> None:
    now_s = time.monotonic()
    record = DeliveryRecorder(
        request_id, "bucket", "root", started_s=now_s, started_unix_s=time.time()
    )
    server.service.traces.begin(record)
    record.accepted(
        path="agg",
        transport="tcp",
        delivery="layerwise",
        policy="equal",
        chunk_count=1,
        payload_bytes=10,
        first_layer=0,
        end_layer=1,
        compute_window_s=None,
        window_source="none",
        rate_bytes_per_s=None,
        now_s=now_s + 1,
    )
    record.fragment_begun(0, now_s + 1)
    record.fragment_read(0, 10, 1.0, now_s + 2)
    record.layers_ready(1, now_s + 2)
    record.ended(now_s + 2, None)


def test_the_command_lists_shows_and_draws(server: ServerThread, tmp_path: Path) -> None:
    for name in ("FIRST", "SECOND", "THIRD"):
        deliver(server, name)
    listed = admin(server, "trace")
    assert listed.exit_code == 0, listed.output
    assert listed.stdout.index("THIRD") < listed.stdout.index("SECOND")
    assert "FIRST" not in listed.stdout
    assert "SECOND" not in admin(server, "trace", "--last", "1").stdout
    svg_file = tmp_path / "trace.svg"
    shown = admin(server, "trace", "SECOND", "--svg", str(svg_file))
    assert shown.exit_code == 0, shown.output
    assert "50 %" in shown.stdout
    assert "Request SECOND" in svg_file.read_text("utf-8")
    found = json.loads(admin(server, "trace", "SECOND", "--json").stdout)
    assert msgspec.convert(found, list[DeliveryTrace])[0].duration_s == pytest.approx(2.0)


def test_an_unknown_request_exits_with_1_and_names_the_setting(server: ServerThread) -> None:
    deliver(server, "FIRST")
    result = admin(server, "trace", "NEVER")
    assert result.exit_code == 1
    assert "the last 2 deliveries" in result.stderr
    assert "scheduler.traces_kept" in result.stderr


def test_what_cannot_be_drawn_exits_with_2(server: ServerThread, tmp_path: Path) -> None:
    deliver(server, "FIRST")
    assert admin(server, "trace", "--svg", str(tmp_path / "x.svg")).exit_code == 2
    unwritable = admin(server, "trace", "FIRST", "--svg", str(tmp_path / "no" / "x.svg"))
    assert unwritable.exit_code == 2
    assert "cannot be written" in unwritable.stderr
