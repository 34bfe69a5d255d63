"""The schedule in force, and the deliveries that run by it, on one screen."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from objectcache_operations.admin.printable import printable, window_source_text
from objectcache_operations.admin.tables import facts_of
from objectcache_runtime.amounts import (
    NONE,
    duration_text,
    gbps_text,
    share_text,
    size_text,
)
from objectcache_schemas.operators.schedule import (
    ScheduleConfiguration,
    ScheduledDelivery,
    ScheduledNic,
    ScheduleState,
    TenantShare,
)

NAME_CELLS = 11
VALUE_CELLS = 20


def schedule_view(state: ScheduleState) -> RenderableType:
    """All of it: what is in force, what is delivered, and who waits."""
    parts: list[RenderableType] = [configuration_view(state), facts_of(_now(state), NAME_CELLS)]
    if state.nics:
        parts.append(_nics_table(state.nics))
    if state.deliveries:
        parts.append(_deliveries_table(state.deliveries))
    return Group(*parts)


def configuration_view(state: ScheduleState) -> RenderableType:
    """What is in force, and whether the settings or an operator said so."""
    changed = {
        name for name in state.changes.__struct_fields__ if getattr(state.changes, name) is not None
    }
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=NAME_CELLS)
    table.add_column(min_width=VALUE_CELLS)
    table.add_column()
    for field, name, value in _values(state.configuration):
        source = "changed" if field in changed else "as in the settings"
        table.add_row(Text(name, style="bold"), Text(value), Text(source))
    tenants = state.configuration.tenants
    return Group(table, _tenants_table(tenants)) if tenants else table


def _values(configuration: ScheduleConfiguration) -> Iterator[tuple[str, str, str]]:
    """Field, name and value of each."""
    yield "policy", "policy", configuration.policy
    yield "cap_gbps", "cap", _gbps(configuration.cap_gbps)
    yield "margin_gbps", "margin", _gbps(configuration.margin_gbps)
    yield "epoch_s", "epoch", duration_text(configuration.epoch_s)
    yield "rates", "rates", configuration.rates
    threshold_bytes = configuration.layerwise_threshold_bytes
    yield "layerwise_threshold_bytes", "threshold", size_text(threshold_bytes)


def _now(state: ScheduleState) -> Iterator[tuple[str, str]]:
    yield "rate", f"{_bytes_rate(state.rate_bytes_per_s)} over the last second"
    shown = len(state.deliveries)
    rest = f"; the first {shown:,} are shown" if shown < state.delivery_count else ""
    yield "deliveries", f"{state.delivery_count:,} running, {state.waiting:,} waiting{rest}"


def _tenants_table(tenants: dict[str, TenantShare]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("tenant", overflow="fold")
    for name in ("weight", "cap", "deliveries at once"):
        table.add_column(name, justify="right", no_wrap=True)
    for tenant, share in sorted(tenants.items()):
        most = f"{share.deliveries_max:,}" if share.deliveries_max else "as everybody"
        table.add_row(Text(printable(tenant)), f"{share.weight:g}", _gbps(share.cap_gbps), most)
    return table


def _nics_table(nics: tuple[ScheduledNic, ...]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("NIC", overflow="fold")
    table.add_column("tenant", overflow="fold")
    for name in ("carries", "now", "queued", "deliveries", "held"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in nics:
        table.add_row(
            Text(printable(one.nic)),
            Text(printable(one.tenant)),
            "not known" if one.nic_bytes_per_s is None else _bytes_rate(one.nic_bytes_per_s),
            _bytes_rate(one.achieved_bytes_per_s),
            size_text(one.queued_bytes),
            f"{one.deliveries:,}",
            f"{one.held:,}",
        )
    return table


def _deliveries_table(deliveries: tuple[ScheduledDelivery, ...]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    names_nics = any(one.nic for one in deliveries)
    for name in ("delivery", "tenant", *(["NIC"] if names_nics else [])):
        table.add_column(name, overflow="fold")
    are_encoded = any(one.decoded_bytes > one.payload_bytes for one in deliveries)
    for name in ("window", "rate", "sent", *(["decoded"] if are_encoded else []), "layer", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in deliveries:
        rate_bytes_per_s = one.rate_bytes_per_s
        table.add_row(
            Text(printable(one.request_id)),
            Text(printable(one.tenant)),
            *([Text(printable(one.nic) or "-")] if names_nics else []),
            _window(one),
            "-" if rate_bytes_per_s is None else _bytes_rate(rate_bytes_per_s),
            share_text(one.sent_bytes, one.payload_bytes),
            *([size_text(one.decoded_bytes)] if are_encoded else []),
            f"{one.next_layer}/{one.num_layers}" if one.pooled else "-",
            duration_text(one.age_s),
        )
    return table


def _window(one: ScheduledDelivery) -> str:
    if one.compute_window_s is None:
        return "-"
    return f"{duration_text(one.compute_window_s)} {window_source_text(one.window_source)}"


def _gbps(rate_gbps: float) -> str:
    return gbps_text(rate_gbps) if rate_gbps else NONE


def _bytes_rate(rate_bytes_per_s: float) -> str:
    return gbps_text(rate_bytes_per_s * 8 / 10**9)
