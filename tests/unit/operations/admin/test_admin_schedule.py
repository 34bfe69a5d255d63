"""`objectcache admin schedule` against a storage server of this process."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from objectcache_operations.admin.schedule.schedule_view import schedule_view
from objectcache_operations.console.app import app
from objectcache_runtime.amounts import (
    duration_text,
    gbps_text,
    parse_duration_s,
    parse_rate_gbps,
)
from objectcache_runtime.settings import load_settings
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import MIB
from objectcache_schemas.operators.schedule import (
    GetSchedule,
    ScheduleChanges,
    ScheduleConfiguration,
    ScheduledDelivery,
    ScheduledNic,
    ScheduleState,
    TenantShare,
)
from tests.storage_client import StorageClient
from tests.unit.operations.admin.test_admin_cli import OperatedEngine, ServerThread, admin, document

SETTINGS = (
    "scheduler.policy=equal",
    "scheduler.cap_gbps=40",
    "scheduler.margin_gbps=3",
    "scheduler.epoch_s=0.02",
)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerThread]:
    for name in [name for name in os.environ if name.startswith("OBJECTCACHE")]:
        monkeypatch.delenv(name)
    where = [f"server.data_dir={tmp_path}", f"server.run_dir={tmp_path}"]
    running = ServerThread(load_settings(None, {}, [*where, *SETTINGS]), OperatedEngine())
    yield running
    running.stop()


def state(server: ServerThread) -> ScheduleState:
    """What the server says itself."""
    with StorageClient(server.settings.storage_socket) as storage:
        return storage.ask(GetSchedule(), ScheduleState)


def schedule(server: ServerThread, *arguments: str) -> str:
    """What a command that succeeds prints."""
    result = admin(server, "schedule", *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


# --- rates and durations ---


@pytest.mark.parametrize(
    ("text", "rate_gbps"),
    [
        ("50Gbps", 50.0),
        ("500Mbps", 0.5),
        ("0.1 tbps", 100.0),
        ("6GB/s", 48.0),
        ("6.25gb/s", 50.0),
        ("1GiB/s", 8.589934592),
        ("250kbps", 0.00025),
    ],
)
def test_rates_are_read_in_bits_or_bytes(text: str, rate_gbps: float) -> None:
    assert parse_rate_gbps(text) == pytest.approx(rate_gbps, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("50", "'50' has no unit; give one of bps, kbps"),
        ("50GBps", "'50GBps' may mean bits or bytes; write Gbps or GB/s"),
        ("50GB", "unknown unit 'GB'"),
        ("-5Gbps", "is not a number"),
        ("0Gbps", "not an amount above 0"),
    ],
)
def test_a_wrong_rate_is_named(text: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        parse_rate_gbps(text)


@pytest.mark.parametrize(
    ("text", "duration_s"), [("10ms", 0.01), ("1ms", 0.001), ("2.5 s", 2.5), ("1000us", 0.001)]
)
def test_durations_are_read_with_their_unit(text: str, duration_s: float) -> None:
    assert parse_duration_s(text) == duration_s


@given(st.floats(1e-6, 1e5))
def test_a_shown_rate_reads_back(rate_gbps: float) -> None:
    shown = parse_rate_gbps(gbps_text(rate_gbps))
    assert shown == pytest.approx(rate_gbps, rel=0.01)


@given(st.floats(1e-5, 1e5))
def test_a_shown_duration_reads_back(duration_s: float) -> None:
    assert parse_duration_s(duration_text(duration_s)) == pytest.approx(duration_s, rel=0.01)


# --- changes ---


@pytest.mark.parametrize(
    ("arguments", "changes", "shown"),
    [
        (["set-cap", "50Gbps"], ScheduleChanges(cap_gbps=50.0), "cap 50 Gbps changed"),
        (["set-cap", "6GB/s"], ScheduleChanges(cap_gbps=48.0), "cap 48 Gbps changed"),
        (["set-cap", "none"], ScheduleChanges(cap_gbps=0.0), "cap none changed"),
        (["set-cap", "0"], ScheduleChanges(cap_gbps=0.0), "cap none changed"),
        (
            ["set-policy", "stall_opt"],
            ScheduleChanges(policy="stall_opt"),
            "policy stall_opt changed",
        ),
        (["set-margin", "500Mbps"], ScheduleChanges(margin_gbps=0.5), "margin 500 Mbps changed"),
        (["set-epoch", "10ms"], ScheduleChanges(epoch_s=0.01), "epoch 10ms changed"),
        (["set-rates", "for_life"], ScheduleChanges(rates="for_life"), "rates for_life changed"),
        (
            ["set-threshold", "512MiB"],
            ScheduleChanges(layerwise_threshold_bytes=512 * MIB),
            "threshold 512.0 MiB changed",
        ),
        (
            ["set-threshold", "none"],
            ScheduleChanges(layerwise_threshold_bytes=0),
            "threshold 0 B changed",
        ),
    ],
)
def test_a_change_is_in_force_and_what_was_not_changed_is_as_in_the_settings(
    server: ServerThread, arguments: list[str], changes: ScheduleChanges, shown: str
) -> None:
    printed = " ".join(schedule(server, *arguments).split())
    assert shown in printed
    assert printed.count("as in the settings") == 5
    assert state(server).changes == changes
    found = state(server).configuration
    for name, value in msgspec.structs.asdict(changes).items():
        if value is not None:
            assert getattr(found, name) == value
    written = server.settings.schedule_file.read_bytes()
    assert msgspec.json.decode(written, type=ScheduleChanges) == changes


def test_a_reset_brings_the_settings_back(server: ServerThread) -> None:
    before = state(server).configuration
    assert (before.policy, before.cap_gbps) == ("equal", 40.0)
    assert (before.margin_gbps, before.epoch_s) == (3.0, 0.02)
    schedule(server, "set-cap", "50Gbps")
    schedule(server, "tenant", "acme", "--weight", "2")
    schedule(server, "reset")
    assert state(server).configuration == before
    assert state(server).changes == ScheduleChanges()


def test_a_tenants_share_changes_where_it_is_told_and_nowhere_else(server: ServerThread) -> None:
    schedule(server, "tenant", "acme", "--weight", "2", "--cap", "10Gbps")
    schedule(server, "tenant", "other", "--weight", "5")
    printed = schedule(server, "tenant", "acme", "--deliveries-max", "8")
    assert "acme 2 10 Gbps 8" in " ".join(printed.split())
    other = TenantShare(weight=5)
    changed = TenantShare(weight=2, cap_gbps=10, deliveries_max=8)
    assert state(server).configuration.tenants == {"acme": changed, "other": other}
    schedule(server, "tenant", "acme", "--cap", "none", "--deliveries-max", "none")
    assert state(server).configuration.tenants["acme"] == TenantShare(weight=2)
    schedule(server, "tenant", "acme", "--reset", "--cap", "1Gbps")
    assert state(server).configuration.tenants["acme"] == TenantShare(cap_gbps=1)
    schedule(server, "tenant", "acme", "--reset")
    assert state(server).configuration.tenants == {"other": other}


def test_a_tenant_that_nobody_is_yet_is_accepted_and_said_so(server: ServerThread) -> None:
    result = admin(server, "schedule", "tenant", "acme\x1b", "--weight", "2")
    assert result.exit_code == 0
    assert result.stderr == "no delivery of tenant acme\\x1b runs; its share waits\n"
    assert admin(server, "schedule", "tenant", "acme\x1b").stderr == ""


def test_a_tenant_without_a_flag_changes_nothing(server: ServerThread) -> None:
    schedule(server, "tenant", "acme")
    assert state(server).changes == ScheduleChanges()
    assert not server.settings.schedule_file.exists()


def test_a_tenant_that_the_server_refuses_is_one_line(server: ServerThread) -> None:
    result = admin(server, "schedule", "tenant", "x" * 300, "--weight", "2")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == ("objectcache: a tenant's name has 1 to 256 characters, one has 300\n")


@pytest.mark.parametrize(
    "arguments", [["show"], ["set-cap", "50Gbps"], ["tenant", "a", "--weight", "2"], ["reset"]]
)
def test_the_state_is_one_document(server: ServerThread, arguments: list[str]) -> None:
    found = document(admin(server, "schedule", *arguments, "--json"))
    assert set(found) == {field.name for field in msgspec.structs.fields(ScheduleState)}
    assert msgspec.convert(found["configuration"], ScheduleConfiguration) == (
        state(server).configuration
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["set-policy", "fastest"],
            "no policy is called 'fastest'; give one of equal, kv_prop, bw_prop, stall_opt, "
            "calibrated_stall_opt, stall_dynamic",
        ),
        (["set-cap", "200Tbps"], "'200Tbps' is above 100000 Gbps, the largest rate"),
        (["set-cap", "fast"], "'fast' is not a number above 0 with one of the units bps"),
        (["set-cap", "-5Gbps"], "'-5Gbps' is not a number above 0 with one of the units"),
        (["set-margin", "-5Gbps"], "'-5Gbps' is not a number above 0"),
        (["set-epoch", "-5ms"], "'-5ms' is not a number above 0"),
        (["set-threshold", "-1MiB"], "'-1MiB' is not a number above 0"),
        (["set-cap", "0.001bps"], "'0.001bps' is below 1 Mbps, the least cap; give none for no"),
        (["tenant", "a", "--cap", "999kbps"], "'999kbps' is below 1 Mbps, the least cap"),
        (["tenant", "a", "--cap", "-5Gbps"], "'-5Gbps' is not a number above 0"),
        (["set-cap", "5"], "or none"),
        (["set-margin", "13000GB/s"], "is above 100000 Gbps"),
        (["set-rates", "ever"], "rates cannot hold 'ever'; give one of every_epoch, for_life"),
        (["set-epoch", "11s"], "'11s' is out of bounds; an epoch takes 1ms to 10s"),
        (["set-epoch", "10us"], "an epoch takes 1ms to 10s"),
        (["set-epoch", "10"], "has no unit; give one of us, ms, s"),
        (["set-threshold", "12"], "has no unit"),
        (["tenant", "a", "--weight", "0"], "--weight: 0 is not from 0.001 to 1000"),
        (["tenant", "a", "--weight", "nan"], "--weight: nan is not"),
        (["tenant", "a", "--cap", "2000Tbps"], "is above 100000 Gbps"),
        (["tenant", "a", "--deliveries-max", "0"], "'0' is no number from 1 to 1000000"),
        (["tenant", "a", "--deliveries-max", "9999999"], "'9999999' is no number from 1 to"),
        (["tenant", "a", "--deliveries-max", "²"], "is no number"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed_before_any_server_is_asked(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    where = ["--data-dir", str(tmp_path / "absent")]
    result = CliRunner().invoke(app, ["admin", "schedule", *arguments, *where])
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


# --- what is shown ---


def delivery(index: int, window_s: float | None = 0.0088) -> ScheduledDelivery:
    return ScheduledDelivery(
        request_id=f"request-{index}",
        tenant="acme",
        pooled=window_s is not None,
        layer_bytes=MIB,
        num_layers=32,
        compute_window_s=window_s,
        window_source="none" if window_s is None else "learned",
        rate_bytes_per_s=None if window_s is None else 1.25e9,
        sent_bytes=8 * MIB,
        payload_bytes=32 * MIB,
        next_layer=8,
        consumed_layers=3,
        age_s=1.25,
    )


def shown(found: ScheduleState, width: int = 80) -> str:
    output = io.StringIO()
    Console(file=output, width=width, highlight=False).print(schedule_view(found))
    assert max(map(len, output.getvalue().splitlines())) <= width
    return " ".join(output.getvalue().split())


def test_nics_are_shown_with_what_they_carry_and_what_waits_for_them(server: ServerThread) -> None:
    nic = ScheduledNic(
        tenant="acme",
        nic="node7",
        nic_bytes_per_s=6.25e9,
        achieved_bytes_per_s=5e9,
        sent_bytes=MIB,
        queued_bytes=24 * MIB,
        deliveries=3,
        held=2,
    )
    unknown = msgspec.structs.replace(nic, nic="node8", nic_bytes_per_s=None, held=0)
    of_node7 = msgspec.structs.replace(delivery(1), nic="node7")
    found = msgspec.structs.replace(
        state(server), deliveries=(of_node7,), delivery_count=1, nics=(nic, unknown)
    )
    text = shown(found)
    assert "node7 acme 50 Gbps 40 Gbps 24.0 MiB 3 2" in text
    assert "node8 acme not known 40 Gbps 24.0 MiB 3 0" in text
    assert "request-1 acme node7 8.8ms" in text


def test_deliveries_are_shown_with_their_windows_rates_and_progress(
    server: ServerThread,
) -> None:
    found = msgspec.structs.replace(
        state(server),
        deliveries=(delivery(1), delivery(2, None)),
        delivery_count=3,
        waiting=4,
        rate_bytes_per_s=5e9,
    )
    words = shown(found)
    assert "rate 40 Gbps over the last second" in words
    assert "deliveries 3 running, 4 waiting; the first 2 are shown" in words
    assert "request-1 acme 8.8ms learned 10 Gbps 25 % 8/32 1.25s" in words
    assert "request-2 acme - - 25 % - 1.25s" in words


def test_what_encoded_deliveries_are_decoded_is_shown_where_there_are_any(
    server: ServerThread,
) -> None:
    encoded = msgspec.structs.replace(delivery(1), decoded_bytes=46 * MIB)
    plain = msgspec.structs.replace(delivery(2), decoded_bytes=32 * MIB)
    both = msgspec.structs.replace(state(server), deliveries=(encoded, plain), delivery_count=2)
    words = shown(both)
    assert "sent decoded layer" in words
    assert "10 Gbps 25 % 46.0 MiB 8/32" in words
    assert "10 Gbps 25 % 32.0 MiB 8/32" in words
    alone = msgspec.structs.replace(both, deliveries=(plain,), delivery_count=1)
    assert "sent layer" in shown(alone)


def test_an_idle_server_shows_its_schedule(server: ServerThread) -> None:
    words = " ".join(schedule(server, "show").split())
    assert words.startswith("policy equal as in the settings cap 40 Gbps as in the settings")
    assert words.endswith("deliveries 0 running, 0 waiting")
    assert json.loads(schedule(server, "show", "--json"))["waiting"] == 0
