"""Which changes of the accounts are made, and which are refused with what."""

from __future__ import annotations

import msgspec
import pytest

from objectcache_schemas.accounts import (
    GRANTS_PER_USER_MAX,
    KEYS_PER_USER_MAX,
    TOKENS_MAX,
    Access,
    AccessKey,
    AccountChange,
    AdminToken,
    DeleteKey,
    DeleteToken,
    DeleteUser,
    Grant,
    PutKey,
    PutToken,
    PutUser,
    RotateKey,
    User,
)
from objectcache_schemas.errors import InvalidRequest, ObjectCacheError
from objectcache_storage_server.accounts.account_rules import (
    EXPIRED_KEPT_S,
    Accounts,
    Surroundings,
    changed,
    checked,
    purged,
)

ALICE = User(name="alice", created_s=1.0)
BOB = User(name="bob", created_s=2.0)
KEY = AccessKey(
    access_key="alice-1", secret_key="a long secret".replace(" ", "-"), user="alice", created_s=1.0
)
TOKEN = AdminToken(token_id="t1", name="ci", token_sha256="0" * 64, scopes=("read",), created_s=1.0)
NOBODYS = Surroundings("rootkey", lambda user: [])


def made(*changes: AccountChange, around: Surroundings = NOBODYS) -> Accounts:
    accounts = Accounts()
    for change in changes:
        accounts = changed(accounts, change, around)
    return accounts


def put(record: User | AccessKey, create: bool = True) -> AccountChange:
    if isinstance(record, User):
        return PutUser(user=record, create=create)
    return PutKey(key=record, create=create)


def named(index: int, user: str = "alice") -> AccessKey:
    return AccessKey(access_key=f"key-{index}", secret_key="12345678", user=user, created_s=1.0)


def refusal(accounts: Accounts, change: AccountChange, around: Surroundings = NOBODYS) -> str:
    with pytest.raises(ObjectCacheError) as caught:
        changed(accounts, change, around)
    return caught.value.code


def test_a_user_with_keys_and_tokens_is_made_and_goes_whole() -> None:
    accounts = made(put(ALICE), put(BOB), put(KEY), PutToken(token=TOKEN))
    assert set(accounts.users) == {"alice", "bob"}
    assert accounts.keys == {"alice-1": KEY}
    left = changed(accounts, DeleteUser(name="alice"), NOBODYS)
    assert set(left.users) == {"bob"}
    assert not left.keys
    assert changed(left, DeleteToken(token_id="t1"), NOBODYS).tokens == {}
    assert set(accounts.users) == {"alice", "bob"}  # what was there is not changed in place


def test_creating_what_exists_is_refused_and_replacing_it_is_not() -> None:
    accounts = made(put(ALICE), put(KEY))
    other = User(name="alice", created_s=9.0, enabled=False)
    assert refusal(accounts, put(other)) == "EntityAlreadyExists"
    assert refusal(accounts, put(KEY)) == "EntityAlreadyExists"
    assert changed(accounts, put(other, create=False), NOBODYS).users["alice"] == other


def test_an_access_key_cannot_move_to_another_user() -> None:
    accounts = made(put(ALICE), put(BOB), put(KEY))
    stolen = AccessKey(access_key="alice-1", secret_key="12345678", user="bob", created_s=1.0)
    assert refusal(accounts, put(stolen, create=False)) == "EntityAlreadyExists"


def test_a_rotation_makes_the_new_key_and_ends_the_old_one_or_does_neither() -> None:
    before = made(put(ALICE), put(BOB), put(KEY), put(named(1)), put(named(2, "bob")))
    ending = msgspec.structs.replace(KEY, expires_s=9.0)
    after = changed(before, RotateKey(key=named(3), old=ending), NOBODYS)
    assert after.keys == {**before.keys, "alice-1": ending, "key-3": named(3)}
    assert refusal(before, RotateKey(key=named(1), old=ending)) == "EntityAlreadyExists"
    assert refusal(before, RotateKey(key=named(3, "bob"), old=ending)) == "InvalidArgument"
    assert refusal(before, RotateKey(key=named(3), old=named(4))) == "NoSuchEntity"
    stolen = named(2)  # bob's, said to be alice's
    assert refusal(before, RotateKey(key=named(3), old=stolen)) == "EntityAlreadyExists"
    assert before.keys["alice-1"] == KEY


def test_nobody_takes_the_root_key_or_the_root_name() -> None:
    accounts = made(put(ALICE))
    root = AccessKey(access_key="rootkey", secret_key="12345678", user="alice", created_s=1.0)
    assert refusal(accounts, put(root)) == "EntityAlreadyExists"
    assert refusal(accounts, put(User(name="root", created_s=1.0))) == "InvalidArgument"
    assert refusal(accounts, DeleteUser(name="root")) == "NoSuchEntity"


def test_what_is_not_there_is_named() -> None:
    for change in (
        DeleteUser(name="alice"),
        DeleteKey(access_key="alice-1"),
        DeleteToken(token_id="t1"),
        put(KEY),  # of a user who is not there
    ):
        assert refusal(Accounts(), change) == "NoSuchEntity"


def test_a_user_who_owns_buckets_stays_and_the_buckets_are_named() -> None:
    around = Surroundings(None, lambda user: [f"bucket-{index}" for index in range(13)])
    with pytest.raises(ObjectCacheError, match=r"bucket-0, .*bucket-9 and 3 more") as caught:
        changed(made(put(ALICE)), DeleteUser(name="alice"), around)
    assert caught.value.code == "DeleteConflict"


def test_limits_name_themselves() -> None:
    full = made(put(ALICE), *(put(named(index)) for index in range(KEYS_PER_USER_MAX)))
    assert refusal(full, put(named(99))) == "LimitExceeded"
    assert changed(full, put(named(0), create=False), NOBODYS).keys == full.keys
    tokens = made(
        *(
            PutToken(
                token=AdminToken(
                    token_id=f"t{index}",
                    name="n",
                    token_sha256="0" * 64,
                    scopes=("read",),
                    created_s=1.0,
                )
            )
            for index in range(TOKENS_MAX)
        )
    )
    assert refusal(tokens, PutToken(token=TOKEN)) == "EntityAlreadyExists"
    more = AdminToken(
        token_id="more", name="n", token_sha256="0" * 64, scopes=("x",), created_s=1.0
    )
    assert refusal(tokens, PutToken(token=more)) == "LimitExceeded"


@pytest.mark.parametrize(
    "user",
    [
        User(name="", created_s=1.0),
        User(name="a" * 65, created_s=1.0),
        User(name="alice\n", created_s=1.0),  # which $ in a pattern would let through
        User(name="al ice", created_s=1.0),
        User(name="alice", created_s=1.0, grants=(Grant(bucket="Upper", access=(Access.READ,)),)),
        User(name="alice", created_s=1.0, grants=(Grant(bucket="logs", access=()),)),
        User(
            name="alice",
            created_s=1.0,
            grants=(Grant(bucket="logs", access=(Access.READ,), prefix="ü" * 513),),
        ),
    ],
)
def test_impossible_users_are_refused(user: User) -> None:
    with pytest.raises(InvalidRequest):
        changed(Accounts(), put(user), NOBODYS)


def test_too_many_grants_are_refused_in_users_and_in_scopes() -> None:
    grants = (Grant(bucket="*", access=(Access.READ,)),) * (GRANTS_PER_USER_MAX + 1)
    assert refusal(Accounts(), put(User(name="alice", created_s=1.0, grants=grants))) == (
        "LimitExceeded"
    )
    scoped = AccessKey(
        access_key="alice-2", secret_key="12345678", user="alice", created_s=1.0, scope=grants
    )
    assert refusal(made(put(ALICE)), put(scoped)) == "LimitExceeded"


@pytest.mark.parametrize(
    ("access_key", "secret_key"),
    [("ab", "12345678"), ("a b c", "12345678"), ("alice-2", "1234567"), ("alice-2", "1234 5678")],
)
def test_impossible_keys_are_refused_without_their_secret(access_key: str, secret_key: str) -> None:
    key = AccessKey(access_key=access_key, secret_key=secret_key, user="alice", created_s=1.0)
    with pytest.raises(InvalidRequest) as caught:
        changed(made(put(ALICE)), put(key), NOBODYS)
    assert secret_key not in str(caught.value)


@pytest.mark.parametrize(
    ("digest", "scopes"), [("0" * 63, ("read",)), ("G" * 64, ("read",)), ("0" * 64, ())]
)
def test_impossible_tokens_are_refused(digest: str, scopes: tuple[str, ...]) -> None:
    token = AdminToken(token_id="t", name="n", token_sha256=digest, scopes=scopes, created_s=1.0)
    with pytest.raises(InvalidRequest):
        changed(Accounts(), PutToken(token=token), NOBODYS)


def test_the_expired_are_kept_for_a_day_and_then_forgotten() -> None:
    expired = AccessKey(
        access_key="old", secret_key="12345678", user="alice", created_s=1.0, expires_s=1000.0
    )
    token = AdminToken(
        token_id="t",
        name="n",
        token_sha256="0" * 64,
        scopes=("x",),
        created_s=1.0,
        expires_s=1000.0,
    )
    accounts = made(put(ALICE), put(KEY), put(expired), PutToken(token=token))
    assert purged(accounts, 1000.0 + EXPIRED_KEPT_S) is accounts
    later = purged(accounts, 1001.0 + EXPIRED_KEPT_S)
    assert set(later.keys) == {"alice-1"}
    assert not later.tokens


def test_accounts_that_nobody_could_have_made_are_refused_whole() -> None:
    good = made(put(ALICE), put(KEY), PutToken(token=TOKEN))
    assert checked(good, NOBODYS) is good
    with pytest.raises(ObjectCacheError, match="no user alice"):
        checked(Accounts(keys=good.keys), NOBODYS)
    with pytest.raises(ObjectCacheError, match="root key"):
        checked(good, Surroundings("alice-1", lambda user: []))
    many = {f"key-{index}": named(index) for index in range(KEYS_PER_USER_MAX + 1)}
    with pytest.raises(ObjectCacheError, match="64 access keys"):
        checked(Accounts(users=good.users, keys=many), NOBODYS)
