"""Commits of several threads as one: a flush of the data, a transaction, a flush of the index.

While a group is being stored, commits wait; whoever waits longest then stores all that do. So the
cost of a flush is shared by as many as there are, and a commit on its own waits for nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from threading import Event, Lock
from typing import NamedTuple

from objectcache_schemas.errors import ObjectCacheError
from objectcache_storage_server.engines.local.commits.judged_commit import LocalCommit, fill_rows
from objectcache_storage_server.engines.local.index.lmdb_index import IndexChange
from objectcache_storage_server.engines.local.objects.stored_objects import StoredObjects
from objectcache_storage_server.engines.local.records import Version
from objectcache_storage_server.engines.local.space.holdings import OfObjects

GROUP_MAX = 64  # commits of one transaction, which bounds its pages


class _Waiting:
    """A commit in line."""

    def __init__(self, commit: LocalCommit) -> None:
        self.commit = commit
        self.names = {(commit.bucket_name, key) for key in commit.keys}
        self.called = Event()  # it is over, or has to store what waits
        self.is_over = False
        self.error: BaseException | None = None


class _Freed(NamedTuple):
    """What a group leaves to do when the index is durable."""

    extents: Sequence[int]  # nobody's any more
    direct_ranges: Sequence[tuple[int, int]]  # that the page cache need not keep


class CommitGroups:
    """Stores commits, each on behalf of its thread. Safe to use from any thread."""

    def __init__(self, objects: StoredObjects) -> None:
        self._objects = objects
        self._lock = Lock()
        self._line: list[_Waiting] = []
        self._is_storing = False  # somebody stores, and will call the first in line

    def store(self, commit: LocalCommit) -> None:
        """Return when a prepared commit is stored, durably where its bucket asks for that.

        Raises as `Engine.commit` says; what is wrong with others concerns none but them.
        """
        own = _Waiting(commit)
        if not commit.durable:  # it waits for nobody's flush
            self._finish([own], self._store_all([own]))
        else:
            self._store_in_turn(own)
        if own.error is not None:
            raise own.error

    def _store_in_turn(self, own: _Waiting) -> None:
        with self._lock:
            self._line.append(own)
            leads, self._is_storing = not self._is_storing, True
        if not leads:
            own.called.wait()
            if own.is_over:
                return
        with self._lock:
            group = group_of(self._line)
            del self._line[: len(group)]
        freed = self._store_all(group)
        with self._lock:
            self._is_storing = bool(self._line)
            if self._line:
                self._line[0].called.set()
        self._finish(group, freed)

    def _finish(self, group: Sequence[_Waiting], freed: Sequence[_Freed]) -> None:
        """Make the index durable, where somebody asks for it, and let the group go."""
        objects = self._objects
        durable = [one for one in group if one.commit.durable and one.error is None]
        try:
            if durable:
                objects.index.sync()  # of a group that follows closely, it may be both's
                for each in freed:
                    objects.flusher.drop(each.extents)  # until then a crash may bring them back
                    objects.flushes.drop_from_cache(each.direct_ranges)
        except BaseException as error:
            for one in durable:
                one.error = error
        for one in group:
            one.is_over = True
            one.called.set()

    def _store_all(self, group: Sequence[_Waiting]) -> list[_Freed]:
        """Store a group, or where something spoils it for all, each on its own. Raises nothing."""
        try:
            changed = self._store(group)
        except BaseException as error:
            if len(group) > 1:
                return [freed for one in group for freed in self._store_all([one])]
            group[0].error = error
            return []
        return [changed]

    def _store(self, group: Sequence[_Waiting]) -> _Freed:
        """Flush, change the index, and what follows from it. What is raised has changed nothing."""
        objects = self._objects
        commits = [one.commit for one in group]
        if any(commit.durable for commit in commits):
            objects.flushes.flush(
                sorted(set().union(*(each.written_extents() for each in commits)))
            )
        for commit in commits:
            commit.flushed()
        with objects.changing:
            emptied, rows = self._change_index(group)
            stored = [one.commit for one in group if one.error is None]
            objects.holdings.forget(
                [gone for each in stored for gone in (*each.replaced, *each.taken_over)]
            )
            objects.holdings.store([version for each in stored for version in each.versions], rows)
            for commit in stored:
                commit.keep()
            return self._leave_to_flush(stored, emptied)

    def _change_index(self, group: Sequence[_Waiting]) -> tuple[list[int], OfObjects]:
        """One transaction; returns the extents that it empties and the rows of what it adds."""
        holdings = self._objects.holdings
        numbers, rows = holdings.new_object_rows(sum(len(one.commit.keys) for one in group))
        try:
            with self._objects.index.writing(durable=False) as change:
                versions = self._add_versions(group, change, numbers)
                stored = [one.commit for one in group if one.error is None]
                emptied = holdings.emptied_by([gone for each in stored for gone in each.replaced])
                change.remove_extents(emptied)
                fill_rows(rows[: len(versions)], versions)
                change.add(versions, rows[: len(versions)])
        except BaseException:
            holdings.give_back_objects(numbers)
            raise
        holdings.give_back_objects(numbers[len(versions) :])
        return emptied, rows[: len(versions)]

    @staticmethod
    def _add_versions(
        group: Sequence[_Waiting], change: IndexChange, numbers: Sequence[int]
    ) -> list[Version]:
        versions: list[Version] = []
        grown_bytes: Counter[int] = Counter()
        for one in group:
            one.error = None
            try:
                bucket = one.commit.judge_again(change, grown_bytes)
            except ObjectCacheError as error:
                if len(group) == 1:
                    raise
                one.error = error
                continue
            end = len(versions) + len(one.commit.to_store)
            versions += one.commit.name_versions(change, bucket, numbers[len(versions) : end])
        return versions

    def _leave_to_flush(self, stored: Sequence[LocalCommit], emptied: Sequence[int]) -> _Freed:
        """Tell the flusher what waits for it. From here on anybody may delete what was stored, and
        its extents' numbers be others'.
        """
        objects = self._objects
        durable: set[int] = set()
        for commit in stored:
            extents = {number for version in commit.versions for number in version.extents}
            if commit.durable:
                durable |= extents
            else:
                objects.flusher.add(extents, ())
        if not any(commit.durable for commit in stored):
            objects.flusher.add((), emptied)
            emptied = ()
        return _Freed(emptied, objects.flushes.direct_ranges(sorted(durable)))


def group_of(line: Sequence[_Waiting]) -> list[_Waiting]:
    """The first in line, and those behind it that can be stored with it: no two touch one key, and
    what takes over extents of stored versions is stored alone.
    """
    group: list[_Waiting] = []
    names: set[tuple[str, str]] = set()
    for one in line[:GROUP_MAX]:
        if group and (one.commit.takes_over or not names.isdisjoint(one.names)):
            break
        group.append(one)
        names |= one.names
        if one.commit.takes_over:
            break
    return group
