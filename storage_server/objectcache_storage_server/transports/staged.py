"""Over a fabric: readers fill staging memory, and the fabric writes it into the client's."""

from objectcache_fabrics.staged_writes import StagedWrites
from objectcache_storage_server.transports.base import Transport


class StagedTransport(StagedWrites, Transport):
    """A delivery's transport into memory that a fabric reaches."""
