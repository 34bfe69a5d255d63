"""The text that the conversation is about."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from objectcache_schemas.errors import InvalidRequest

DISTRIBUTION = "objectcache"
CHECKOUT_DOCUMENT = Path(__file__).parents[3] / "docs" / "architecture.md"
DOCUMENT_BYTES_MIN = 64  # less gives no prefix worth storing


@dataclass(frozen=True, slots=True)
class Document:
    """Text and where it came from."""

    name: str
    text: bytes


def load_document(file: Path | None, bytes_max: int) -> Document:
    """The beginning of `file`, or of our own documentation.

    Raises `InvalidRequest` if it cannot be read or is too short to be a prefix.
    """
    document = _read(file) if file is not None else _own_document()
    if len(document.text) < DOCUMENT_BYTES_MIN:
        raise InvalidRequest(
            f"document {document.name} holds {len(document.text)} bytes, "
            f"at least {DOCUMENT_BYTES_MIN} are needed"
        )
    return Document(document.name, document.text[:bytes_max])


def _read(file: Path) -> Document:
    try:
        return Document(str(file), file.read_bytes())
    except OSError as error:
        raise InvalidRequest(f"document {file}: {error.strerror}") from error


def _own_document() -> Document:
    if CHECKOUT_DOCUMENT.is_file():
        return Document("docs/architecture.md", CHECKOUT_DOCUMENT.read_bytes())
    try:
        description = importlib.metadata.metadata(DISTRIBUTION).json.get("description", "")
    except importlib.metadata.PackageNotFoundError as error:
        raise InvalidRequest("no document of our own is installed; give --document FILE") from error
    return Document(f"the description of the package {DISTRIBUTION}", str(description).encode())
