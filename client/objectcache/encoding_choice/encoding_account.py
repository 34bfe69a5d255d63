"""What a client learns of encoded deliveries of a bucket, and whether it asks for the next one.

Pure. The first delivery is plain and measures the link. Encoded ones are asked for while the rates
of both say that they pay, and while those that were encoded let the engine wait less than plain
ones did, which counts what no rate shows: other threads, a host's other work. Of what is not known
a trial is made, seldom enough that one that goes badly is lost in the others.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass

from objectcache.encoding_choice.encoding_gain import DeliveryRates

DECODE_BYTES_PER_S_ASSUMED = 0.5e9  # of one thread, before it has decoded: half of what most do
DECODE_BYTES_PER_S_HOPED = 2e9  # of a trial
RATIO_ASSUMED = 1.4
ENCODED_IN_A_ROW = 64  # then one is plain: else nobody would notice a link that has become fast
REST_FIRST, REST_MAX = 256, 1 << 16  # plain deliveries before another trial
PLAIN_COMPARED, ENCODED_COMPARED = 3, 2  # the last ones: bytes for each second of waiting
FADING = 0.5  # what a delivery counts when the next one ends
BUCKETS_MAX = 64  # least recently used ones are forgotten


@dataclass(frozen=True, slots=True)
class EndedDelivery:
    """What was seen of a delivery whose layers all came. Of the link, bytes and seconds from the
    first layer to the last; of decoding, decoded bytes and the seconds that it took; and how long
    the engine waited for layers, decoding included. `delivered_bytes` are as chunks have them, so
    not dequantised.
    """

    delivered_bytes: int
    wire_bytes: int
    link_bytes: int
    link_s: float
    waited_s: float
    decode_s: float = 0.0
    is_encoded: bool = False


class FadingRate:
    """Amounts per second, of which the last counts most."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    def note(self, amount: float, seconds: float) -> None:
        """Some more."""
        self._amount = self._amount * FADING + amount
        self._seconds = self._seconds * FADING + seconds

    @property
    def per_s(self) -> float:
        """0 where nothing is known."""
        return self._amount / self._seconds if self._seconds > 0 else 0.0


class EncodingAccount:
    """One bucket's deliveries to one client, or fetcher. Not thread-safe."""

    def __init__(self, decoders: int = 1) -> None:
        """`decoders` is how many slices are decoded at a time."""
        self._decoders = decoders
        self._link = {False: FadingRate(), True: FadingRate()}  # of plain ones, of encoded ones
        self._decode = FadingRate()
        self._plain_progress: deque[float] = deque(maxlen=PLAIN_COMPARED)
        self._encoded_progress: deque[float] = deque(maxlen=ENCODED_COMPARED)
        self._ratio = RATIO_ASSUMED
        self._plain_run = self._encoded_run = 0
        self._rest = REST_FIRST
        self._is_resting = False

    def asks(self, compute_s_per_byte: float = 0.0) -> bool:
        """Whether the next delivery is asked for encoded."""
        link_bytes_per_s = max(self._link[False].per_s, self._link[True].per_s)
        if link_bytes_per_s == 0 or self._encoded_run >= ENCODED_IN_A_ROW:
            return False
        assumed_bytes_per_s = self._decoders * DECODE_BYTES_PER_S_ASSUMED
        decode_bytes_per_s, ratio = self._decode.per_s or assumed_bytes_per_s, self._ratio
        if self._is_trial:
            decode_bytes_per_s = self._decoders * DECODE_BYTES_PER_S_HOPED
            ratio = RATIO_ASSUMED
        elif self._is_resting:
            return False
        return DeliveryRates(link_bytes_per_s, decode_bytes_per_s, ratio, compute_s_per_byte).pays

    @property
    def _is_trial(self) -> bool:
        """Whether the next delivery is one, where it is encoded."""
        return self._plain_run >= self._rest

    def ended(self, seen: EndedDelivery) -> None:
        """A delivery has ended, whether it had been asked for encoded or not."""
        if seen.link_s > 0:
            self._link[seen.is_encoded].note(seen.link_bytes, seen.link_s)
        progress = self._encoded_progress if seen.is_encoded else self._plain_progress
        progress.append(seen.delivered_bytes / max(seen.waited_s, 1e-9))
        if not seen.is_encoded:
            self._plain_run, self._encoded_run = self._plain_run + 1, 0
            return
        was_trial = self._is_trial
        self._plain_run, self._encoded_run = 0, self._encoded_run + 1
        self._ratio = seen.delivered_bytes / seen.wire_bytes
        if was_trial:
            self._decode = FadingRate()  # what it was before is long ago
        self._decode.note(seen.delivered_bytes, seen.decode_s)
        self._judge()

    def _judge(self) -> None:
        """Go on with encoded ones, or rest: for longer each time."""
        encoded = max(self._encoded_progress)
        is_worse = all(encoded < plain for plain in self._plain_progress)
        if is_worse:
            self._rest = min(2 * self._rest, REST_MAX) if self._is_resting else REST_FIRST
            self._encoded_progress.clear()
            self._link[True] = FadingRate()
        self._is_resting = is_worse

    def __repr__(self) -> str:
        link, decode = max(one.per_s for one in self._link.values()), self._decode.per_s
        state = ", resting" if self._is_resting else ""
        return f"<EncodingAccount link {link:.3g} B/s, decode {decode:.3g} B/s{state}>"


class EncodingAccounts:
    """Those of a client, by names of buckets. Thread-safe."""

    def __init__(self, decoders: int = 1) -> None:
        """See `EncodingAccount`."""
        self._decoders = decoders
        self._accounts: OrderedDict[str, EncodingAccount] = OrderedDict()
        self._lock = threading.Lock()

    def asks(self, bucket: str, compute_s_per_byte: float = 0.0) -> bool:
        """See `EncodingAccount.asks`."""
        with self._lock:
            return self._account(bucket).asks(compute_s_per_byte)

    def ended(self, bucket: str, seen: EndedDelivery) -> None:
        """See `EncodingAccount.ended`."""
        with self._lock:
            self._account(bucket).ended(seen)

    def _account(self, bucket: str) -> EncodingAccount:
        account = self._accounts.setdefault(bucket, EncodingAccount(self._decoders))
        self._accounts.move_to_end(bucket)
        while len(self._accounts) > BUCKETS_MAX:
            self._accounts.popitem(last=False)
        return account

    def __repr__(self) -> str:
        return f"<EncodingAccounts {len(self._accounts)}/{BUCKETS_MAX} buckets>"
