"""The restart policy, in virtual time."""

import pytest

from objectcache_operations.supervisor.restarts import (
    BACKOFF_FIRST_S,
    RESTART_WINDOW_S,
    RESTARTS_MAX,
    GiveUp,
    Restart,
    RestartPolicy,
    describe_exit,
)


def test_each_death_in_a_row_is_followed_by_a_longer_wait() -> None:
    policy = RestartPolicy()
    delays = [policy.after_exit(1, now_s=float(second)) for second in range(3)]
    assert delays == [
        Restart(BACKOFF_FIRST_S),
        Restart(BACKOFF_FIRST_S * 2),
        Restart(BACKOFF_FIRST_S * 4),
    ]


def test_one_death_more_than_allowed_within_the_window_gives_up() -> None:
    policy = RestartPolicy()
    for second in range(RESTARTS_MAX):
        assert isinstance(policy.after_exit(-9, now_s=float(second)), Restart)
    last_s = RESTART_WINDOW_S - 0.1
    decision = policy.after_exit(-9, now_s=last_s)
    assert isinstance(decision, GiveUp)
    assert decision.exit_code == 1
    assert "5 times within 60 s" in decision.reason


def test_deaths_outside_the_window_are_forgotten() -> None:
    policy = RestartPolicy()
    for second in range(RESTARTS_MAX):
        policy.after_exit(1, now_s=float(second))
    late_s = RESTARTS_MAX + RESTART_WINDOW_S
    assert policy.after_exit(1, now_s=late_s) == Restart(BACKOFF_FIRST_S)


def test_a_rare_death_never_gives_up() -> None:
    policy = RestartPolicy()
    decisions = {policy.after_exit(1, now_s=n * RESTART_WINDOW_S) for n in range(100)}
    assert decisions == {Restart(BACKOFF_FIRST_S)}


def test_wrong_settings_are_never_retried_and_keep_their_exit_code() -> None:
    decision = RestartPolicy().after_exit(2, now_s=0.0)
    assert isinstance(decision, GiveUp)
    assert decision.exit_code == 2


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-9, "was killed by SIGKILL"),
        (-200, "was killed by signal 200"),
    ],
)
def test_an_exit_is_described_in_words(exit_code: int, words: str) -> None:
    assert describe_exit(exit_code) == words
