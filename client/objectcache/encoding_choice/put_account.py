"""Whether puts of a bucket are encoded: by how long the caller of past ones was held up. Pure."""

from __future__ import annotations

import statistics
import threading
from collections import OrderedDict, deque
from math import log2

from objectcache.encoding_choice.encoding_account import (
    BUCKETS_MAX,
    ENCODED_COMPARED,
    ENCODED_IN_A_ROW,
    PLAIN_COMPARED,
    RATIO_ASSUMED,
    REST_FIRST,
    REST_MAX,
)
from objectcache.encoding_choice.encoding_gain import GAIN_MIN

ENCODE_BYTES_PER_S_ASSUMED = 0.75e9  # of a trial, in the thread that puts
MEASURED_BYTES_MIN = 1 << 20  # of a put; of smaller ones the round trip is what takes time
CLASSES_PER_DOUBLING = 4  # so that a round trip shifts rates of one class by a fifth at most
ACCOUNTS_MAX = 16 * BUCKETS_MAX


class PutAccount:
    """One bucket's puts of about one size, of one client. Not thread-safe.

    The first put is plain. The second is encoded if a guess says that this pays, and from then on
    the last ones of both are compared as a whole: bytes of chunks for each second of the caller's.
    """

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=PLAIN_COMPARED)  # bytes per second of the last
        self._encoded: deque[float] = deque(maxlen=ENCODED_COMPARED)
        self._plain_run = self._encoded_run = 0
        self._rest = 1
        self._is_resting = True

    def encodes(self) -> bool:
        """Whether the next put is to be encoded."""
        if not self._plain or self._encoded_run >= ENCODED_IN_A_ROW:
            return False
        if not self._is_trial:
            return not self._is_resting
        plain = statistics.median(self._plain)
        assumed_s = 1 / ENCODE_BYTES_PER_S_ASSUMED + 1 / (RATIO_ASSUMED * plain)
        return 1 / plain >= GAIN_MIN * assumed_s

    @property
    def _is_trial(self) -> bool:
        """Whether the next put is one, where it is encoded."""
        return self._plain_run >= self._rest

    def ended(self, chunk_bytes: int, seconds: float, *, is_encoded: bool) -> None:
        """A put has ended well, which held its caller up for so long."""
        rate = chunk_bytes / max(seconds, 1e-9)
        if not is_encoded:
            if self._encoded_run:  # the link may have become another one meanwhile
                self._plain.clear()
            self._plain.append(rate)
            self._plain_run, self._encoded_run = self._plain_run + 1, 0
            if not self._is_resting:
                self._judge()
            return
        self._ended_encoded(rate)

    def not_shorter(self) -> None:
        """A put was encoded in vain, and went plain: it counts as an encoded one that has no rate
        at all, and teaches nothing of plain ones.
        """
        self._ended_encoded(0.0)

    def _ended_encoded(self, rate: float) -> None:
        if not self._plain:
            return
        if self._is_trial:  # what it was before is long ago
            self._encoded.clear()
        self._encoded.append(rate)
        self._plain_run, self._encoded_run = 0, self._encoded_run + 1
        self._judge()

    def _judge(self) -> None:
        """Go on with encoded ones, or rest: for longer each time."""
        is_worse = max(self._encoded) < GAIN_MIN * statistics.median(self._plain)
        if is_worse and self._is_resting:
            self._rest = min(max(REST_FIRST, 2 * self._rest), REST_MAX)
        else:
            self._rest = REST_FIRST
        if is_worse:
            self._encoded_run = 0
        self._is_resting = is_worse

    def __repr__(self) -> str:
        plain, encoded = (max(rates, default=0.0) for rates in (self._plain, self._encoded))
        state = ", resting" if self._is_resting else ""
        return f"<PutAccount plain {plain:.3g} B/s, encoded {encoded:.3g} B/s{state}>"


class PutAccounts:
    """Those of a client, by names of buckets and by sizes: what a put takes beside its bytes would
    else make small ones say of large ones what is not so. Thread-safe.
    """

    def __init__(self) -> None:
        self._accounts: OrderedDict[tuple[str, int], PutAccount] = OrderedDict()
        self._lock = threading.Lock()

    def encodes(self, bucket: str, chunk_bytes: int) -> bool:
        """See `PutAccount.encodes`. A put of less than `MEASURED_BYTES_MIN` goes as ones of so
        many do.
        """
        with self._lock:
            return self._account(bucket, chunk_bytes).encodes()

    def ended(self, bucket: str, chunk_bytes: int, seconds: float, *, is_encoded: bool) -> None:
        """See `PutAccount.ended`."""
        if chunk_bytes < MEASURED_BYTES_MIN:
            return
        with self._lock:
            self._account(bucket, chunk_bytes).ended(chunk_bytes, seconds, is_encoded=is_encoded)

    def not_shorter(self, bucket: str, chunk_bytes: int) -> None:
        """See `PutAccount.not_shorter`."""
        if chunk_bytes < MEASURED_BYTES_MIN:
            return
        with self._lock:
            self._account(bucket, chunk_bytes).not_shorter()

    def _account(self, bucket: str, chunk_bytes: int) -> PutAccount:
        size_class = int(CLASSES_PER_DOUBLING * log2(max(chunk_bytes, MEASURED_BYTES_MIN)))
        account = self._accounts.setdefault((bucket, size_class), PutAccount())
        self._accounts.move_to_end((bucket, size_class))
        while len(self._accounts) > ACCOUNTS_MAX:
            self._accounts.popitem(last=False)
        return account

    def __repr__(self) -> str:
        return f"<PutAccounts {len(self._accounts)}/{ACCOUNTS_MAX} of buckets and sizes>"
