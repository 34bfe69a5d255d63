"""What is counted of requests. Called in the event loop only, once a request."""

from __future__ import annotations

from collections import defaultdict

from objectcache_gateway.request.routes import Operation
from objectcache_runtime.metrics.metric_cells import BoundedNames, Histogram

NO_OPERATION = "none"  # refused before it was known what is asked for
NO_TENANT = "anonymous"
# Why a request is nobody's: its credentials are missing, malformed, unknown or wrong.
AUTHENTICATION_CODES = frozenset(
    {
        "AccessDenied",
        "AuthorizationHeaderMalformed",
        "AuthorizationQueryParametersError",
        "InvalidAccessKeyId",
        "InvalidToken",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
    }
)


class OperationCell:
    """The requests of one operation."""

    __slots__ = ("duration", "first_byte", "received_bytes", "sent_bytes", "statuses")

    def __init__(self) -> None:
        self.statuses: defaultdict[int | str, int] = defaultdict(int)
        self.duration = Histogram()
        self.first_byte = Histogram()
        self.received_bytes = 0
        self.sent_bytes = 0


class TenantRequestCell:
    """The requests of one tenant, and what they found."""

    __slots__ = (
        *("matched_chunks", "matched_tokens", "missed_chunks", "missed_tokens"),
        *("received_bytes", "sent_bytes", "statuses"),
    )

    def __init__(self) -> None:
        self.statuses: defaultdict[int | str, int] = defaultdict(int)
        self.received_bytes = 0
        self.sent_bytes = 0
        self.matched_chunks = self.missed_chunks = 0
        self.matched_tokens = self.missed_tokens = 0


class RequestCounts:
    """Counts by operation and by tenant, apart: the numbers of series add up, not multiply."""

    def __init__(self, tenants_max: int) -> None:
        """`tenants_max`: `admin.tenants_in_metrics_max`."""
        self.operations: dict[str, OperationCell] = {}
        self.tenants: dict[str, TenantRequestCell] = {}
        self.errors: defaultdict[str, int] = defaultdict(int)
        self.authentication_failures: defaultdict[str, int] = defaultdict(int)
        self.quota_refusals: defaultdict[str, int] = defaultdict(int)
        self.rdma_declines: defaultdict[str, int] = defaultdict(int)
        self.unreadable = 0
        self.accepted_connections = 0
        self._names = BoundedNames(tenants_max)
        # By the operation itself, whose name costs more to find than its cell.
        self._by_operation: dict[Operation | None, OperationCell] = {}

    def ended(
        self,
        operation: Operation | None,
        identity: str | None,
        status: int | str,
        error_code: str,
        first_byte_s: float | None,
        elapsed_s: float,
        received_bytes: int,
        sent_bytes: int,
    ) -> None:
        """A request ended, with an HTTP status, or with a word where it got none.

        `first_byte_s` is None where nothing was answered.
        """
        cell = self._by_operation.get(operation) or self._add_operation(operation)
        cell.statuses[status] += 1
        cell.duration.observe(elapsed_s)
        if first_byte_s is not None:
            cell.first_byte.observe(first_byte_s)
        cell.received_bytes += received_bytes
        cell.sent_bytes += sent_bytes
        tenant = self.tenants.get(identity or NO_TENANT) or self._tenant(identity)
        tenant.statuses[status] += 1
        tenant.received_bytes += received_bytes
        tenant.sent_bytes += sent_bytes
        if error_code:
            self.errors[error_code] += 1
            if identity is None and error_code in AUTHENTICATION_CODES:
                self.authentication_failures[error_code] += 1

    def matched(self, identity: str, asked: int, matched: int, chunk_tokens: int) -> None:
        """A prefix of `asked` chunks was looked up. `chunk_tokens` 0: the bucket has no layout."""
        cell = self._tenant(identity)
        missed = asked - matched
        cell.matched_chunks += matched
        cell.missed_chunks += missed
        cell.matched_tokens += matched * chunk_tokens
        cell.missed_tokens += missed * chunk_tokens

    def _add_operation(self, operation: Operation | None) -> OperationCell:
        name = NO_OPERATION if operation is None else operation.value
        cell = self._by_operation[operation] = self.operations[name] = OperationCell()
        return cell

    def _tenant(self, identity: str | None) -> TenantRequestCell:
        # Whoever could not be told apart takes no tenant's place.
        name = NO_TENANT if identity is None else self._names[identity]
        cell = self.tenants.get(name)
        if cell is None:
            cell = self.tenants[name] = TenantRequestCell()
        return cell
