"""Files that remember which of their writes a power cut may still lose. Pure: no system is asked.

What was written is there for every reader until `cut`. What survives a cut:

- of a file, what its last flush covered; of every later write any part, sector by sector, in any
  order, and any size that the file has had since;
- of a directory, the names as of its last flush; of every later change of a name either a beginning
  of the changes, as a journal keeps them, or any of them. A rename is one change;
- a file without a name that survived is gone, flushed or not.

What a flush that failed was to write is lost without a cut, and no later flush knows of it.
"""

from __future__ import annotations

import errno
import posixpath
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

SECTOR_BYTES = 512
PAGE_BYTES = 4096

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Write:
    """Bytes at an offset, and the size that the file has after them."""

    offset_bytes: int
    data: Bytes
    size_bytes: int


class LossyFile:
    """One regular file."""

    def __init__(self) -> None:
        self.content = bytearray()
        self._durable = bytearray()
        self._unflushed: list[_Write] = []

    @property
    def is_flushed(self) -> bool:
        """Whether a cut can lose nothing."""
        return not self._unflushed

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """What is there now, cut short at the file's end."""
        return bytes(self.content[offset_bytes : offset_bytes + length_bytes])

    def write(self, offset_bytes: int, data: bytes) -> None:
        """Write; bytes between the old end and the offset are zero."""
        end_bytes = offset_bytes + len(data)
        if end_bytes > len(self.content):
            self.content.extend(bytes(end_bytes - len(self.content)))
        self.content[offset_bytes:end_bytes] = data
        self._log(offset_bytes, np.frombuffer(data, np.uint8))

    def resize(self, size_bytes: int) -> None:
        """Cut short, or lengthen with zeros."""
        old_bytes = len(self.content)
        if size_bytes < old_bytes:
            del self.content[size_bytes:]
            self._log(size_bytes, np.zeros(old_bytes - size_bytes, np.uint8))
        elif size_bytes > old_bytes:
            self.content.extend(bytes(size_bytes - old_bytes))
            self._log(old_bytes, np.zeros(0, np.uint8))

    def flush(self) -> None:
        """What was written until now survives every cut."""
        for write in self._unflushed:
            _apply(self._durable, write)
        self._unflushed.clear()
        _resize(self._durable, len(self.content))

    def lose(self) -> None:
        """A flush that failed: what it was to write is on no device, and no later flush writes it.
        A page cache may still have it, the device does not. The size is as it was.
        """
        if self._unflushed:
            size_bytes = len(self.content)
            self.content = bytearray(self._durable)
            _resize(self.content, size_bytes)
            self._unflushed = [_Write(0, np.zeros(0, np.uint8), size_bytes)]

    def cut(self, rng: random.Random, how: CutStyle) -> None:
        """Lose a random part of what was not flushed."""
        if self._unflushed:
            self.content = self._survivors(rng, how)
            self._durable = bytearray(self.content)
            self._unflushed.clear()

    def _log(self, offset_bytes: int, data: Bytes) -> None:
        self._unflushed.append(_Write(offset_bytes, data, len(self.content)))

    def _survivors(self, rng: random.Random, how: CutStyle) -> bytearray:
        writes = self._unflushed
        most_bytes = max(
            len(self._durable), *(write.offset_bytes + len(write.data) for write in writes)
        )
        result = np.zeros(most_bytes, np.uint8)
        result[: len(self._durable)] = np.frombuffer(self._durable, np.uint8)
        kept = how.kept_counts(rng, -(-most_bytes // how.sector_bytes), len(writes))
        for number, write in enumerate(writes):
            begin, end = write.offset_bytes, write.offset_bytes + len(write.data)
            sectors = np.arange(begin, end) // how.sector_bytes
            survives = kept[sectors] > number
            result[begin:end][survives] = write.data[survives]
        sizes = [len(self._durable), *(write.size_bytes for write in writes)]
        survived = bytearray(result.tobytes())
        _resize(survived, sizes[how.kept_count(rng, len(writes))])
        return survived


@dataclass(frozen=True, slots=True)
class CutStyle:
    """How a cut chooses what survives."""

    sector_bytes: int
    kind: str  # nothing, everything, order, torn or whole

    @staticmethod
    def chosen(rng: random.Random) -> CutStyle:
        """One of all styles; mostly those that tear."""
        kinds = ["nothing", "everything", "order", "torn", "torn", "whole", "whole"]
        return CutStyle(rng.choice([SECTOR_BYTES, PAGE_BYTES]), rng.choice(kinds))

    def kept_count(self, rng: random.Random, change_count: int) -> int:
        """How many of some changes in order survive."""
        match self.kind:
            case "nothing":
                return 0
            case "everything":
                return change_count
            case _:
                return rng.randint(0, change_count)

    def kept_counts(
        self, rng: random.Random, sector_count: int, change_count: int
    ) -> npt.NDArray[np.int64]:
        """The same, for every sector."""
        chooser = np.random.default_rng(rng.getrandbits(64))
        match self.kind:
            case "torn":  # a sector reached the device at any time
                return chooser.integers(0, change_count + 1, sector_count)
            case "whole":  # a sector reached the device as it was in the end, or never
                return np.where(chooser.random(sector_count) < rng.random(), change_count, 0)
            case _:
                return np.full(sector_count, self.kept_count(rng, change_count))


NOTHING = CutStyle(SECTOR_BYTES, "nothing")  # what was not flushed is lost, all of it


@dataclass(slots=True)
class LossyDirectory:
    """Names of one directory, and their changes since its last flush."""

    names: dict[str, Node] = field(default_factory=dict)
    durable_names: dict[str, Node] = field(default_factory=dict)
    unflushed: list[dict[str, Node | None]] = field(default_factory=list)

    def change(self, change: dict[str, Node | None]) -> None:
        """Set or remove names, as one change."""
        _change_names(self.names, change)
        self.unflushed.append(change)

    def flush(self) -> None:
        """The names of now survive every cut."""
        self.durable_names = dict(self.names)
        self.unflushed.clear()

    def cut(self, rng: random.Random, how: CutStyle) -> None:
        """Lose some of the changes that were not flushed."""
        names = dict(self.durable_names)
        if how.kind == "torn":
            kept = [change for change in self.unflushed if rng.random() < 0.5]
        else:
            kept = self.unflushed[: how.kept_count(rng, len(self.unflushed))]
        for change in kept:
            _change_names(names, change)
        self.names = names
        self.flush()


Node = LossyFile | LossyDirectory


class LossyTree:
    """A tree of directories and files below "/"."""

    def __init__(self) -> None:
        self.root = LossyDirectory()

    def find(self, path: str) -> Node:
        """What a path names; raises `FileNotFoundError` and `NotADirectoryError`."""
        node: Node = self.root
        for name in filter(None, path.split("/")):
            if not isinstance(node, LossyDirectory):
                raise NotADirectoryError(errno.ENOTDIR, "no directory", path)
            if name not in node.names:
                raise FileNotFoundError(errno.ENOENT, "no such name", path)
            node = node.names[name]
        return node

    def file(self, path: str) -> LossyFile:
        """The file of a path; raises `IsADirectoryError` too."""
        node = self.find(path)
        if not isinstance(node, LossyFile):
            raise IsADirectoryError(errno.EISDIR, "a directory", path)
        return node

    def directory(self, path: str) -> LossyDirectory:
        """The directory of a path."""
        node = self.find(path)
        if not isinstance(node, LossyDirectory):
            raise NotADirectoryError(errno.ENOTDIR, "no directory", path)
        return node

    def add(self, path: str, node: Node) -> None:
        """Give a node a name."""
        folder, name = posixpath.split(path)
        self.directory(folder).change({name: node})

    def remove(self, path: str) -> None:
        """Remove a name; who holds the node still has it."""
        self.find(path)
        folder, name = posixpath.split(path)
        self.directory(folder).change({name: None})

    def rename(self, old: str, new: str) -> None:
        """Rename, as one change where both are in one directory."""
        node = self.find(old)
        (old_folder, old_name), (new_folder, new_name) = posixpath.split(old), posixpath.split(new)
        if old_folder == new_folder:
            self.directory(old_folder).change({old_name: None, new_name: node})
        else:
            self.directory(new_folder).change({new_name: node})
            self.directory(old_folder).change({old_name: None})

    def cut(self, seed: int, how: CutStyle | None = None) -> CutStyle:
        """Cut the power: forget a random part of what was not flushed, or what `how` says."""
        rng = random.Random(seed)
        how = CutStyle.chosen(rng) if how is None else how
        for node in self._nodes(self.root):
            node.cut(rng, how)
        return how

    def _nodes(self, node: Node) -> Iterator[Node]:
        yield node
        if isinstance(node, LossyDirectory):  # after its own cut, so what lost its name is gone
            for child in list(node.names.values()):
                yield from self._nodes(child)


def _change_names(names: dict[str, Node], change: dict[str, Node | None]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def _apply(content: bytearray, write: _Write) -> None:
    end_bytes = write.offset_bytes + len(write.data)
    _resize(content, max(len(content), end_bytes))
    content[write.offset_bytes : end_bytes] = write.data.tobytes()
    _resize(content, write.size_bytes)


def _resize(content: bytearray, size_bytes: int) -> None:
    if size_bytes < len(content):
        del content[size_bytes:]
    else:
        content.extend(bytes(size_bytes - len(content)))
