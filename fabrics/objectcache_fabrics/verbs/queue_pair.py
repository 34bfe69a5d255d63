"""A reliable connection of verbs: a queue pair, its completion queue, and the descriptor that says
when to look.

What is posted is not counted here: whoever posts keeps within the depths that were asked for.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

from objectcache_fabrics.peers import NO_LANE, TrafficLane
from objectcache_fabrics.verbs.address import Announcement, VerbsAddress
from objectcache_fabrics.verbs.device import VerbsDevice, descriptor_lock
from objectcache_fabrics.verbs.pyverbs_binding import load_pyverbs, translated
from objectcache_schemas.errors import Unavailable

# An unanswered packet is sent again after 4.096 us x 2^14 = 67 ms (hardware takes up to four times
# that), 6 times: a client that is gone is given up after half a second to 2 s. 7 would be for ever
# in the kernel's software device.
ACK_TIMEOUT = 14
RETRIES = 6
# Announcements are posted only where a receive waits for them, so 6 refusals mean a client that
# lies; 7 would be for ever. The timer, 0.64 ms, is what a refusal asks to wait.
RECEIVE_RETRIES = 6
RECEIVE_RETRY_TIMER = 12
HOPS_MAX = 64
SEGMENTS_MAX = 16  # of one write; what a device allows more is not worth its queue's memory
_RECEIVE = 1 << 63  # in a completion's number: of a receive
_POLLED_MAX = 64


class Segment(NamedTuple):
    """A run of registered memory of this process."""

    address: int
    length_bytes: int
    local_key: int


class Completion(NamedTuple):
    """The end of something posted. `failure` is the library's name for what went wrong, in words;
    empty for a success. Only receives have an announcement.
    """

    number: int
    failure: str = ""
    announcement: Announcement | None = None
    is_receive: bool = False


class QueuePair:
    """One end of a connection, open for receives from the start, for sends once connected.

    Its methods are called by one thread at a time, except `arm`, `take_events` and `poll`, which
    another may call meanwhile.
    """

    def __init__(
        self, device: VerbsDevice, *, send_depth: int, receive_depth: int, reads_answered: int
    ) -> None:
        """Raises `Unavailable` where the device gives no more of these, or not so deep."""
        self._verbs = verbs = load_pyverbs()
        self._device = device
        self._closed = False
        self.is_destroyed = False  # the device has let go of all memory that was posted
        enums = verbs.enums
        access = enums.IBV_ACCESS_LOCAL_WRITE
        if receive_depth:
            access |= enums.IBV_ACCESS_REMOTE_WRITE
        if reads_answered:
            access |= enums.IBV_ACCESS_REMOTE_READ
        self._access = access
        self._reads_answered = reads_answered
        with translated(f"device {device.name} gives no completion queue"):
            self._channel, self.descriptor = _channel_and_descriptor(verbs, device.context)
            os.set_blocking(self.descriptor, False)  # the library would wait holding Python's lock
            depth = send_depth + receive_depth
            self._queue: Any = verbs.cq.CQ(device.context, depth, None, self._channel, 0)
        with translated(f"device {device.name} gives no queue pair"):
            self._pair: Any = verbs.qp.QP(device.domain, self._asked_for(send_depth, receive_depth))
            self._initialise()
        self.address = VerbsAddress(
            qp_num=self._pair.qp_num,
            psn=secrets.randbits(24),
            gid=device.gid,
            lid=device.lid,
            mtu_bytes=device.mtu_bytes,
            receives=receive_depth,
            reads=reads_answered,
        )
        self._make_work()

    def _asked_for(self, send_depth: int, receive_depth: int) -> Any:
        qp, enums = self._verbs.qp, self._verbs.enums
        capacity = qp.QPCap(
            max_send_wr=max(1, send_depth),
            max_recv_wr=max(1, receive_depth),
            max_send_sge=min(SEGMENTS_MAX, self._device.segments_max),
            max_recv_sge=1,
        )
        return qp.QPInitAttr(
            qp_type=enums.IBV_QPT_RC, scq=self._queue, rcq=self._queue, cap=capacity, sq_sig_all=0
        )

    def _initialise(self) -> None:
        attributes = self._verbs.qp.QPAttr(port_num=self._device.port)
        attributes.pkey_index = 0
        attributes.qp_access_flags = self._access
        self._pair.to_init(attributes)

    def _make_work(self) -> None:
        """Requests that are posted again and again: making one costs several times its posting.

        A request reads the segment that was set, in place. The library would free one of the two
        twice, so neither is closed: each connection leaves 100 bytes behind.
        """
        wr = self._verbs.wr
        self._segment = wr.SGE(0, 0, 0)
        self._work = wr.SendWR(num_sge=1, sg=[self._segment])
        self._work.sg_list = self._segment
        self._receive = wr.RecvWR(wr_id=_RECEIVE, num_sge=1, sg=[self._segment])
        self._receive.num_sge = 0  # nothing is received but the announcement; 44 makes none with 0

    def connect(self, peer: VerbsAddress, lane: TrafficLane = NO_LANE) -> None:
        """Be ready to send to the peer, in a lane, and to hear from it.

        Raises `Unavailable` where this device cannot reach its address, which may take a while;
        other threads go on meanwhile.
        """
        self._device.find(peer.gid)  # the library looks for it holding Python's lock
        addr, qp = self._verbs.addr, self._verbs.qp
        attributes = qp.QPAttr(port_num=self._device.port)
        attributes.qp_access_flags = self._access
        attributes.path_mtu = (min(self._device.mtu_bytes, peer.mtu_bytes) // 128).bit_length() - 1
        attributes.dest_qp_num = peer.qp_num
        attributes.rq_psn, attributes.sq_psn = peer.psn, self.address.psn
        attributes.max_rd_atomic = min(self._device.reads_asked_max, peer.reads)
        attributes.max_dest_rd_atomic = self._reads_answered
        attributes.min_rnr_timer = RECEIVE_RETRY_TIMER
        attributes.timeout, attributes.retry_cnt = ACK_TIMEOUT, RETRIES
        attributes.rnr_retry = RECEIVE_RETRIES
        with translated("the peer cannot be reached from this device"):
            attributes.ah_attr = self._path_to(addr, peer, lane)
            self._pair.to_rts(attributes)

    def _path_to(self, addr: Any, peer: VerbsAddress, lane: TrafficLane) -> Any:
        port, level = self._device.port, lane.service_level
        if not self._device.is_ethernet:
            return addr.AHAttr(port_num=port, is_global=0, dlid=peer.lid, sl=level)
        route = addr.GlobalRoute(
            dgid=addr.GID(peer.gid_text),
            sgid_index=self._device.gid_index,
            hop_limit=HOPS_MAX,
            traffic_class=lane.traffic_class,
        )
        return addr.AHAttr(port_num=port, is_global=1, gr=route, sl=level)

    def write(
        self, number: int, segments: Sequence[Segment], address: int, key: int, *, signalled: bool
    ) -> None:
        """Post a write of the segments, one behind the other, to the peer's memory."""
        self._post(self._verbs.enums.IBV_WR_RDMA_WRITE, number, segments, address, key, signalled)

    def read(
        self, number: int, segments: Sequence[Segment], address: int, key: int, *, signalled: bool
    ) -> None:
        """Post a read of the peer's memory into the segments, one after the other."""
        self._post(self._verbs.enums.IBV_WR_RDMA_READ, number, segments, address, key, signalled)

    def announce(self, number: int, announcement: Announcement, *, signalled: bool) -> None:
        """Post a write of no bytes, which takes one of the receives that the peer has posted."""
        self._work.imm_data = socket.htonl(announcement.to_immediate())
        operation = self._verbs.enums.IBV_WR_RDMA_WRITE_WITH_IMM
        self._post(operation, number, (_NOTHING,), 0, 0, signalled)

    def _post(
        self,
        operation: int,
        number: int,
        segments: Sequence[Segment],
        address: int,
        key: int,
        signalled: bool,
    ) -> None:
        flags = self._verbs.enums.IBV_SEND_SIGNALED if signalled else 0
        if len(segments) > 1:
            self._post_gathered(operation, number, segments, address, key, flags)
            return
        segment, work = self._segment, self._work
        segment.addr, segment.length, segment.lkey = segments[0]
        work.wr_id, work.opcode, work.send_flags = number, operation, flags
        work.set_wr_rdma(key, address)
        with translated("the device takes no more work"):
            self._pair.post_send(work)

    def _post_gathered(
        self,
        operation: int,
        number: int,
        segments: Sequence[Segment],
        address: int,
        key: int,
        flags: int,
    ) -> None:
        """The library leaks what is not closed."""
        wr = self._verbs.wr
        pieces = [wr.SGE(*segment) for segment in segments]
        work = wr.SendWR(
            wr_id=number, opcode=operation, num_sge=len(pieces), sg=pieces, send_flags=flags
        )
        work.set_wr_rdma(key, address)
        try:
            with translated("the device takes no more work"):
                self._pair.post_send(work)
        finally:
            work.close()
            for piece in pieces:
                piece.close()

    def post_receives(self, count: int) -> None:
        """Take this many announcements more."""
        with translated("the device takes no more receives"):
            for _ in range(count):
                self._pair.post_recv(self._receive)

    def arm(self) -> None:
        """Have the descriptor become readable at the next completion. Poll once more afterwards:
        what came before is not told.
        """
        with translated("the device tells of no completions"):
            self._queue.req_notify()

    def take_events(self) -> None:
        """Take what made the descriptor readable."""
        try:
            while True:
                self._channel.get_cq_event(self._queue)
                self._queue.ack_events(1)  # an event that was not acknowledged would block `close`
        except self._verbs.error:
            return  # there is no other

    def poll(self) -> list[Completion]:
        """What has ended; empty where nothing has."""
        with translated("the completion queue is lost"):
            _, polled = self._queue.poll(_POLLED_MAX)
        return [self._completion(each) for each in polled]

    def _completion(self, polled: Any) -> Completion:
        """After a failure nothing but the number and the status means anything."""
        enums = self._verbs.enums
        number, is_receive = polled.wr_id & ~_RECEIVE, bool(polled.wr_id & _RECEIVE)
        if polled.status != enums.IBV_WC_SUCCESS:
            return Completion(number, _failure(enums, polled.status), None, is_receive)
        if not is_receive:
            return Completion(number)
        immediate = socket.ntohl(polled.imm_data)
        return Completion(number, "", Announcement.from_immediate(immediate), True)

    def fail(self) -> None:
        """Stop: what is posted ends as failed, soon, and what the peer sends is refused."""
        attributes = self._verbs.qp.QPAttr(qp_state=self._verbs.enums.IBV_QPS_ERR)
        with translated("a queue pair does not stop"):
            self._pair.modify(attributes, self._verbs.enums.IBV_QP_STATE)

    def close(self) -> None:
        """End it. Afterwards the device touches none of the memory that was posted, and the peer
        none of this end's. Repeating has no effect.

        Raises `Unavailable` where the device refuses; then `is_destroyed` says whether the above
        is so, and repeating tries again.
        """
        if self._closed:
            return
        with descriptor_lock, translated("a queue pair does not close"):
            self._pair.close()
            self.is_destroyed = True
            self.take_events()
            self._queue.close()
            self._channel.close()
        self._closed = True

    def __repr__(self) -> str:
        return f"<QueuePair on {self._device.name}>"


_NOTHING = Segment(0, 0, 0)
_FAILURES = {
    "IBV_WC_RETRY_EXC_ERR": "the peer does not answer: it is gone, or the network to it is",
    "IBV_WC_RNR_RETRY_EXC_ERR": "the peer has posted no receives",
    "IBV_WC_REM_ACCESS_ERR": "the peer refuses: its memory is not registered so",
    "IBV_WC_REM_INV_REQ_ERR": "the peer refuses the request",
    "IBV_WC_REM_OP_ERR": "the peer's device failed",
    "IBV_WC_LOC_QP_OP_ERR": "this host's device or link failed",
    "IBV_WC_LOC_PROT_ERR": "this host's memory is not registered",
    "IBV_WC_WR_FLUSH_ERR": "the connection has ended",
}


def _failure(enums: Any, status: int) -> str:
    for name, words in _FAILURES.items():
        if getattr(enums, name) == status:
            return words
    return f"the device reports status {status}"


def _channel_and_descriptor(verbs: Any, context: Any) -> tuple[Any, int]:
    """A completion channel and its file descriptor, which rdma-core 44 does not tell."""
    with descriptor_lock:
        before = _event_descriptors()
        channel = verbs.cq.CompChannel(context)
        descriptor: int | None = getattr(channel, "fd", None)
        if descriptor is None:
            added = _event_descriptors() - before
            if len(added) != 1:
                raise Unavailable("the completion channel's descriptor was not found in /proc")
            (descriptor,) = added
        return channel, descriptor


def _event_descriptors() -> set[int]:
    """Descriptors of this process that RDMA events come from."""
    found: set[int] = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # closed meanwhile
        if "infinibandevent" in link:
            found.add(int(name))
    return found
