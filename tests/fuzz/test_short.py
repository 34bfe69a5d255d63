"""The short form of `make fuzz`: a few seconds of every part, with the same judge."""

from __future__ import annotations

import pytest

from tests.fuzz.__main__ import attack_part
from tests.fuzz.campaign import fuzz_parser
from tests.fuzz.mutation import mutated, random_for
from tests.fuzz.parsers import PARSERS, Parser
from tests.fuzz.servers import Servers

SEED = 20_260


@pytest.mark.parametrize("parser", PARSERS, ids=[parser.name for parser in PARSERS])
def test_a_parser_refuses_what_it_cannot_read(parser: Parser) -> None:
    outcome = fuzz_parser(parser, SEED, range(600))
    assert outcome.inputs == 600
    assert not outcome.failures, "\n".join(map(str, outcome.failures))


@pytest.mark.parametrize(("part", "inputs"), [("http", 400), ("storage", 150), ("targets", 100)])
def test_a_server_bears_what_comes_on_its_socket(servers: Servers, part: str, inputs: int) -> None:
    outcome = attack_part(servers, part, SEED, range(inputs))
    assert outcome.inputs >= inputs
    assert not outcome.failures, "\n".join(map(str, outcome.failures))
    assert not outcome.defects, "\n".join(outcome.defects)
    reached = {"http": "200", "storage": "Done", "targets": "SessionJoined"}
    assert outcome.answers[reached[part]], f"nothing was let through: {outcome.answers}"


@pytest.mark.parametrize("parser", PARSERS, ids=[parser.name for parser in PARSERS])
def test_a_seed_gives_the_same_inputs_and_another_gives_others(parser: Parser) -> None:
    def inputs(seed: int) -> list[bytes]:
        return [mutated(random_for(seed, parser.name, index), parser.seeds) for index in range(50)]

    assert inputs(1) == inputs(1)
    assert inputs(1) != inputs(2)


def test_a_failure_names_the_command_that_repeats_it() -> None:
    def read(data: bytes) -> None:
        if len(data) > 3:
            raise ZeroDivisionError

    outcome = fuzz_parser(Parser("head", read, (b"abc",)), 7, range(50))
    index = outcome.failures[0].index
    assert f"--part head --seed 7 --first {index} --inputs 1" in str(outcome.failures[0])
    assert "ZeroDivisionError" in str(outcome.failures[0])
