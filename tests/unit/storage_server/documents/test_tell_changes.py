"""What another server changed is put in force here, whatever fails meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import closing

import pytest

from objectcache_schemas.accounts import PutUser, User
from objectcache_schemas.errors import Unavailable
from objectcache_storage_server.accounts.account_book import AccountBook
from objectcache_storage_server.accounts.sealing import KEY_BYTES, SecretSeal
from objectcache_storage_server.documents.documents import (
    DocumentKind,
    Kept,
    KeptDocument,
    MemoryDocuments,
)
from objectcache_storage_server.documents.tell_changes import ChangeTeller

BOUND_S = 30.0


@pytest.mark.parametrize("fault", [Unavailable("the store is away"), ValueError("a defect")])
def test_a_listener_that_fails_is_called_again_and_the_others_are_told(fault: Exception) -> None:
    faults = [fault, fault]
    told, other_told = threading.Event(), threading.Event()

    def listener() -> None:
        if faults:
            raise faults.pop()
        told.set()

    with closing(ChangeTeller("teller", retry_s=0.01)) as teller:
        teller.listen("accounts", listener)
        teller.listen("accounts", other_told.set)
        teller.changed(["schedule"])
        teller.changed(["accounts"])
        assert other_told.wait(BOUND_S)
        assert told.wait(BOUND_S)
        told.clear()
        teller.changed(None)
        assert told.wait(BOUND_S)


class HookedDocuments(MemoryDocuments):
    """Documents with something that happens in the midst of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.after_get: Callable[[], None] = lambda: None
        self.before_put: Callable[[], None] = lambda: None
        self.listeners: list[Callable[[], None]] = []

    def get(self, kind: DocumentKind) -> KeptDocument | None:
        found = super().get(kind)
        after, self.after_get = self.after_get, lambda: None
        after()
        return found

    def put(self, kind: DocumentKind, data: bytes, expected: int | None) -> Kept:
        self.before_put()
        return super().put(kind, data, expected)

    def on_change(self, kind: DocumentKind, listener: Callable[[], None]) -> None:
        self.listeners.append(listener)


def add_alice(book: AccountBook) -> None:
    user = User(name="alice", created_s=1.0)
    book.change(PutUser(user=user, create=True), lambda _: [])


def test_a_change_while_the_accounts_are_read_first_is_in_force() -> None:
    documents, seal = HookedDocuments(), SecretSeal(os.urandom(KEY_BYTES))
    other = AccountBook(documents, seal)

    def change() -> None:
        add_alice(other)
        for listener in documents.listeners:
            listener()

    documents.after_get = change
    assert AccountBook(documents, seal).user("alice") is not None


def test_the_accounts_are_told_while_a_change_waits_for_the_store() -> None:
    documents = HookedDocuments()
    book = AccountBook(documents)
    is_waiting, may_go_on = threading.Event(), threading.Event()

    def wait() -> None:
        is_waiting.set()
        assert may_go_on.wait(BOUND_S)

    documents.before_put = wait
    changing = threading.Thread(target=add_alice, args=(book,))
    changing.start()
    assert is_waiting.wait(BOUND_S)
    told = threading.Event()

    def ask() -> None:
        book.directory()
        told.set()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    was_told = told.wait(BOUND_S / 3)
    may_go_on.set()
    changing.join()
    assert was_told
    assert book.directory() == (book.version, book.accounts)
    assert book.user("alice") is not None
