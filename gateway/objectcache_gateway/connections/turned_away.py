"""Whether clients were turned away lately, for the health, the log and the metrics. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields

INTERVAL_S = 10.0
TROUBLE_MIN = 10  # in one interval: one a second


@dataclass(slots=True)
class TurnedAway:
    """What was refused or ended for want of room."""

    strangers_ended: int = 0
    tenants_ended: int = 0
    connections_refused: int = 0
    requests_ended: int = 0
    requests_refused: int = 0

    def since(self, before: TurnedAway) -> TurnedAway:
        """What came after `before`."""
        return TurnedAway(
            *(now - then for now, then in zip(self.counts, before.counts, strict=True))
        )

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers, in the order of the fields."""
        return tuple(self.by_name().values())

    def by_name(self) -> dict[str, int]:
        """The numbers by the names of the fields."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def text(self) -> str:
        """The numbers that are not 0, in words; empty where all are."""
        told = {
            "connections ended on which nobody had signed": self.strangers_ended,
            "connections ended of tenants with most": self.tenants_ended,
            "connections refused (gateway.connections_max)": self.connections_refused,
            "requests of tenants with most given up": self.requests_ended,
            "requests refused (gateway.requests_in_flight_max)": self.requests_refused,
        }
        return ", ".join(f"{count:,} {what}" for what, count in told.items() if count)


class Crowding:
    """The counts since the start, and those of the last interval."""

    def __init__(self, now_s: float) -> None:
        self.total = TurnedAway()
        self._began_s = now_s
        self._at_begin = TurnedAway()
        self._last = TurnedAway()

    def look(self, now_s: float) -> str:
        """What the log has to say: once an interval, and nothing where nobody was turned away."""
        if now_s < self._began_s + INTERVAL_S:
            return ""
        self._last = self.total.since(self._at_begin)
        self._at_begin = TurnedAway(*self.total.counts)
        self._began_s = now_s
        return self._last.text()

    @property
    def reason(self) -> str:
        """Why this is no good health: empty where few were turned away in this interval and in the
        last.
        """
        this = self.total.since(self._at_begin)
        worse = max(this, self._last, key=lambda one: sum(one.counts))
        return f"in {INTERVAL_S:g} s: {worse.text()}" if sum(worse.counts) >= TROUBLE_MIN else ""

    def __repr__(self) -> str:
        return f"<Crowding {self.total.text() or 'nobody'}>"
