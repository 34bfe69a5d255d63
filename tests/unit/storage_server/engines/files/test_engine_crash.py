"""SIGKILL at any moment loses nothing that the files engine acknowledged and shows nothing torn.

This module is also the program that is killed: run with `python -m`, its arguments FOLDER and SEED,
it does one operation after the other, and writes a line before each and another when it has
returned.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from objectcache_storage_server.engines.files.engine import FilesEngine
from tests.contract.engine_suite import BUCKET, content, put_batch, read, stored_keys

KILLS = 10
KEY_COUNT = 30  # few, so that most puts overwrite
State = dict[str, bytes]


def operations(seed: int) -> Any:
    """An endless run of operations: puts of one or many objects, and deletes."""
    rng = random.Random(seed)
    for number in itertools.count():
        keys = rng.sample(range(KEY_COUNT), rng.choice([1, 1, 5, 20]))
        if rng.random() < 0.25:
            yield {"delete": [f"key {key}" for key in keys]}
        else:
            sizes = [rng.choice([0, 100, 65_536, 200_000]) for _ in keys]
            yield {
                "put": {
                    f"key {key}": [seed, number, size]
                    for key, size in zip(keys, sizes, strict=True)
                }
            }


def data_of(operation: dict[str, Any]) -> State:
    return {key: content((key, *what), what[-1]) for key, what in operation["put"].items()}


def after(state: State, operation: dict[str, Any]) -> State:
    """The state that an operation leads to."""
    if "put" in operation:
        return state | data_of(operation)
    return {key: data for key, data in state.items() if key not in operation["delete"]}


def run_until_killed(folder: Path, seed: int) -> None:
    engine = FilesEngine(folder, 64)
    for operation in operations(seed):
        os.write(1, json.dumps(operation).encode() + b"\n")
        if "put" in operation:
            put_batch(engine, data_of(operation))
        else:
            engine.delete(BUCKET.name, operation["delete"])
        os.write(1, b'"done"\n')


def killed_run(folder: Path, seed: int, rng: random.Random) -> list[Any]:
    """Start the program, kill it somewhere, and return the whole lines it wrote."""
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.unit.storage_server.engines.files.test_engine_crash",
            str(folder),
            str(seed),
        ],
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(rng.randrange(1, 60))]
        time.sleep(rng.random() * 0.01)  # anywhere within an operation
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
    assert process.returncode == -signal.SIGKILL, "the program ended before it was killed"
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


@pytest.mark.parametrize("seed", [20_240_607])
def test_a_kill_at_any_moment_loses_and_tears_nothing(tmp_path: Path, seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    engine = FilesEngine(tmp_path, 64)
    engine.create_bucket(BUCKET)
    engine.close()
    state: State = {}
    unfinished_count = 0
    for kill in range(KILLS):
        written = killed_run(tmp_path, seed + kill, rng)
        possible = [state]
        for line in written:  # after its line an operation may have happened; after "done" it has
            possible = [possible[-1]] if line == "done" else [possible[0], after(possible[0], line)]
        unfinished_count += len(possible) - 1

        engine = FilesEngine(tmp_path, 64)
        assert engine.damaged_count == 0
        found = {key: read(engine, key) for key in stored_keys(engine)}
        assert found in possible, f"seed {seed}, kill {kill}"
        assert len(list((tmp_path / "objects").glob("*/*"))) == len(found)
        engine.close()
        state = possible[[found == each for each in possible].index(True)]
    assert unfinished_count > 0, "no kill fell into an operation"


if __name__ == "__main__":
    run_until_killed(Path(sys.argv[1]), int(sys.argv[2]))
