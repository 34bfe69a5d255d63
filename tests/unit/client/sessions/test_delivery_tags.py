"""The tags of a session's deliveries, and what happens where they begin again."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from objectcache.sessions.session_wire import SocketWire
from objectcache.sessions.tags import Tags
from objectcache.sessions.target_session import TargetSession
from objectcache_fabrics.verbs.address import TAG_END, Announcement
from objectcache_schemas.errors import Unavailable
from objectcache_schemas.messages.sessions import LayersReady

DEADLINE_S = 20.0


class Heard:
    """A delivery that notes what it hears."""

    def __init__(self) -> None:
        self.ends: list[int] = []

    def advance(self, ready_end: int) -> None:
        self.ends.append(ready_end)

    def fail(self, reason: str, cause: BaseException | None = None) -> None:
        """The session's end."""


@pytest.fixture
def session() -> Iterator[TargetSession]:
    near, far = socket.socketpair()
    session = TargetSession(SocketWire(near, DEADLINE_S), DEADLINE_S)
    yield session
    session.close()
    far.close()


def announced_over_verbs(session: TargetSession, tag: int, end_layer: int) -> None:
    """What a server says of this tag, as 32 bits have it."""
    come = Announcement.from_immediate(Announcement(tag, end_layer).to_immediate())
    session._dispatch(LayersReady(tag=come.tag, end_layer=come.end_layer))


def test_every_delivery_of_a_long_session_hears_of_its_layers(session: TargetSession) -> None:
    first, last, again = Heard(), Heard(), Heard()
    running = session.listen(first)
    session._tags._last = TAG_END - 2  # half a million deliveries later
    at_the_end, behind = session.listen(last), session.listen(again)
    for tag, end_layer in ((running, 1), (at_the_end, 2), (behind, 3)):
        assert 0 < tag < TAG_END
        announced_over_verbs(session, tag, end_layer)
    assert (first.ends, last.ends, again.ends) == ([1], [2], [3])


def test_tags_begin_again_behind_the_last_and_pass_over_those_in_use() -> None:
    tags = Tags()
    assert [tags.draw(()) for _ in range(3)] == [1, 2, 3]
    tags._last = TAG_END - 3
    assert [tags.draw({1, 3, TAG_END - 1}) for _ in range(3)] == [TAG_END - 2, 2, 4]


def test_without_a_tag_left_a_delivery_is_refused() -> None:
    tags = Tags()
    with pytest.raises(Unavailable, match="let some end"):
        tags.draw(range(TAG_END))
    assert tags.draw(()) == 1  # one has ended since
