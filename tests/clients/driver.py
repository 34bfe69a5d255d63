"""What every client must do, and where. Standard library only: some clients live in a virtual
environment of their own, which has none of our packages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

PART_BYTES = 5 << 20  # the least that S3 allows; clients that can choose use it
REGION = "us-east-1"


class NotOffered(Exception):
    """The client has no way to say this; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the server is and how to speak to it."""

    url: str  # its host is the domain below which buckets are, in virtual-host style
    access_key: str
    secret_key: str = field(repr=False)
    ca_file: str | None = None
    virtual_host: bool = False

    @property
    def netloc(self) -> str:
        """host:port."""
        return urlsplit(self.url).netloc

    @property
    def secure(self) -> bool:
        """Whether it is HTTPS."""
        return self.url.startswith("https:")

    @property
    def addressing_style(self) -> str:
        """botocore's word for it."""
        return "virtual" if self.virtual_host else "path"

    def bucket_netloc(self, bucket: str) -> str:
        """host:port of requests for a bucket."""
        return f"{bucket}.{self.netloc}" if self.virtual_host else self.netloc


class S3Driver(ABC):
    """One client, unmodified, behind the steps of the matrix.

    Every method raises whatever the client raises where the server refuses. `workspace` is an empty
    directory of this driver's own; it is also HOME of what it starts.
    """

    # Keys that the client cannot say, and why. The server serves them to others.
    cannot_name: Mapping[str, str] = {}

    def __init__(self, endpoint: Endpoint, workspace: Path) -> None:
        self.endpoint = endpoint
        self.workspace = workspace

    @abstractmethod
    def version(self) -> str:
        """What the client calls itself."""

    @abstractmethod
    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Store an object, as the client does by default for its size."""

    @abstractmethod
    def put_parts(self, bucket: str, key: str, data: bytes) -> None:
        """Store an object in a multipart upload."""

    @abstractmethod
    def get(self, bucket: str, key: str) -> bytes:
        """The whole object."""

    @abstractmethod
    def get_range(self, bucket: str, key: str, first: int, end: int) -> bytes:
        """Bytes from `first` to before `end`."""

    @abstractmethod
    def size_bytes(self, bucket: str, key: str) -> int | None:
        """Length of an object without its bytes; None where there is no object."""

    @abstractmethod
    def keys(self, bucket: str, prefix: str) -> list[str]:
        """All keys that begin with `prefix`, over as many pages as it takes."""

    @abstractmethod
    def copy(self, bucket: str, source: str, target: str) -> None:
        """Copy an object inside of the bucket without its bytes passing through the client."""

    @abstractmethod
    def delete(self, bucket: str, key: str) -> None:
        """Delete an object."""
