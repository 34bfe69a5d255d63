"""Where a server keeps its documents."""

from __future__ import annotations

from objectcache_runtime.settings import Settings
from objectcache_storage_server.documents.documents import Documents, MemoryDocuments
from objectcache_storage_server.documents.file_documents import FileDocuments


def open_documents(settings: Settings) -> Documents:
    """Files of the data directory; in memory where there is none."""
    return FileDocuments(settings.data_dir) if settings.server.data_dir else MemoryDocuments()
