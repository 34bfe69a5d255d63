"""What the scheduler answers when it is asked who goes next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from objectcache_storage_server.scheduling.fragments import Fragment
from objectcache_storage_server.scheduling.lanes.delivery_flow import JobT


@dataclass(frozen=True, slots=True)
class NextFragment(Generic[JobT]):
    """This fragment of this job goes now."""

    job: JobT
    fragment: Fragment


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing may go before `until_s`; infinity: before something changes. A time that has come: a
    decision has taken enough steps, the next one goes on.
    """

    until_s: float
