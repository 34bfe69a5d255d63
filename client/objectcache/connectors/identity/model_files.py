"""A model's files on this host: where they are, and what tells them from others there."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

DIGEST_CHARS = 32  # 128 bits
WEIGHT_FILES_MAX = 100_000  # a directory of more is none of weights
INDEX_BYTES_MAX = 64 << 20

_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_NAME = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)?")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".mistral", ".ckpt")
_INDEXES = (".index.json",)
# Beside a model's configuration: its own code, how its weights are quantised, and an adapter's
# rank and scale.
_OTHERS = (
    ".py",
    "quant_config.json",
    "quantize_config.json",
    "quantization_config.json",
    "adapter_config.json",
)


def hub_cache_of(environment: Mapping[str, str]) -> Path:
    """Where Hugging Face's hub keeps what it has downloaded."""
    if cache := environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := environment.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    caches = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "huggingface" / "hub"


def model_directory(model: str, revision: str | None, hub_cache: Path) -> Path | None:
    """The directory that a path or a hub's name with its revision is loaded from; None where this
    host has none.

    Without a `revision` it is not known which one the engine loads: then a name of the hub leads
    to the snapshot in the cache where there is exactly one, and nowhere where there are several.
    """
    path = Path(model).expanduser()
    try:
        if path.exists():
            return path if path.is_dir() else path.parent
        if not _HUB_NAME.fullmatch(model):
            return None
        stored = hub_cache / f"models--{model.replace('/', '--')}"
        if revision is None:
            return _only_snapshot(stored)
        snapshot = stored / "snapshots" / _commit_in_hub(stored, revision)
        return snapshot if snapshot.is_dir() else None
    except (OSError, ValueError):
        return None


def _only_snapshot(stored: Path) -> Path | None:
    snapshots = [path for path in (stored / "snapshots").iterdir() if _COMMIT.fullmatch(path.name)]
    return snapshots[0] if len(snapshots) == 1 else None


def _commit_in_hub(stored: Path, revision: str) -> str:
    if _COMMIT.fullmatch(revision):
        return revision
    commit = (stored / "refs" / revision).read_text().strip()
    if not _COMMIT.fullmatch(commit):
        raise ValueError(f"{revision} names no commit")
    return commit


def commit_of_path(directory: Path) -> str | None:
    """The commit of a snapshot in a hub's cache."""
    parts = directory.absolute().parts
    for parent, name in pairwise(parts):
        if parent == "snapshots" and _COMMIT.fullmatch(name):
            return name
    return None


def files_revision(directory: Path) -> str | None:
    """What tells a directory's weights from others: the commit of a hub's snapshot, or a digest of
    its files. None for a directory without weights.
    """
    if commit := commit_of_path(directory):
        return f"commit {commit}"
    digest = files_digest(directory)
    return None if digest is None else f"files {digest}"


def files_digest(directory: Path) -> str | None:
    """Digest of the names, sizes and times of weight files, of their index and of the model's own
    code: 32 hex digits. None for a directory without weights.

    A copy that does not keep the times counts as other weights: then KV is computed again, while
    other weights of the same sizes are never taken for these.
    """
    digest = hashlib.sha256()
    found = 0
    try:
        for path in sorted(directory.iterdir()):
            if path.name.endswith((*_WEIGHTS, *_INDEXES, *_OTHERS)):
                found += path.name.endswith((*_WEIGHTS, *_INDEXES))
                if found > WEIGHT_FILES_MAX:
                    return None
                stat = path.stat()
                digest.update(f"{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
                if path.name.endswith(_INDEXES) and stat.st_size <= INDEX_BYTES_MAX:
                    digest.update(path.read_bytes())
    except OSError:
        return None
    return digest.hexdigest()[:DIGEST_CHARS] if found else None
