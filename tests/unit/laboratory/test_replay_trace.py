"""Trace lines, keys and the hits that must follow from them."""

import json
from pathlib import Path

import pytest

from objectcache_laboratory.replay.trace import TraceRequest, read_trace
from objectcache_laboratory.replay.workload import (
    bucket_name,
    chunk_keys,
    first_askers,
    replay_layout,
    tokens_of,
)
from objectcache_schemas.errors import InvalidRequest

GOOD = {"timestamp": 27, "input_length": 1000, "output_length": 5, "hash_ids": [0, 7]}


def request(*hash_ids: int, input_length: int = 1, timestamp: float = 0) -> TraceRequest:
    return TraceRequest(timestamp, input_length, 1, hash_ids)


def written(directory: Path, *lines: object) -> Path:
    file = directory / "trace.jsonl"
    file.write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    )
    return file


def test_requests_are_read_in_order_up_to_the_number_asked(tmp_path: Path) -> None:
    file = written(tmp_path, GOOD, "", {**GOOD, "timestamp": 28.5, "more": [1]}, "not reached")
    requests = read_trace(file, 2, 512)
    assert requests[0] == TraceRequest(27, 1000, 5, (0, 7))
    assert requests[1].arrival_s == 0.0285


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({**GOOD, "timestamp": "27"}, r"line 2: .*\$\.timestamp"),
        ({**GOOD, "timestamp": -1}, r"line 2: .*\$\.timestamp"),
        ({**GOOD, "input_length": 0}, r"line 2: .*\$\.input_length"),
        ({**GOOD, "input_length": 512}, r"line 2: \$\.input_length 512 makes 1 blocks .* has 2"),
        ({**GOOD, "input_length": 1025}, r"line 2: \$\.input_length 1025 makes 3 blocks"),
        ({**GOOD, "hash_ids": []}, r"line 2: .*\$\.hash_ids"),
        ({**GOOD, "hash_ids": [1, -2]}, r"line 2: .*\$\.hash_ids\[1\]"),
        ({**GOOD, "hash_ids": [1.5]}, r"line 2: .*\$\.hash_ids\[0\]"),
        ({"timestamp": 1, "input_length": 1, "output_length": 1}, "line 2: .*hash_ids"),
        ("{", "line 2: .*truncated"),
        ("[]", "line 2: Expected `object`"),
    ],
)
def test_a_malformed_line_is_refused_naming_file_line_and_field(
    tmp_path: Path, line: object, words: str
) -> None:
    file = written(tmp_path, GOOD, line)
    with pytest.raises(InvalidRequest, match=words) as caught:
        read_trace(file, 10, 512)
    assert str(file) in caught.value.message


def test_a_missing_trace_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"absent\.jsonl: No such file"):
        read_trace(tmp_path / "absent.jsonl", 1, 512)


def test_the_key_of_a_block_depends_on_every_hash_id_up_to_it() -> None:
    layout = replay_layout(0.01, 2, 512, seed=0)
    keys = chunk_keys(layout, request(1, 2, 3))
    assert chunk_keys(layout, request(1, 2, 4))[:2] == keys[:2]
    assert chunk_keys(layout, request(1, 2, 4))[2] != keys[2]
    assert chunk_keys(layout, request(9, 2, 3))[2] != keys[2]
    assert len(set(keys)) == 3
    assert chunk_keys(layout, request((1 << 32) + 1))[0] != chunk_keys(layout, request(1))[0]


def test_another_seed_or_geometry_shares_neither_keys_nor_bucket() -> None:
    layouts = [
        replay_layout(0.01, 2, 512, seed=0),
        replay_layout(0.01, 2, 512, seed=1),
        replay_layout(0.02, 2, 512, seed=0),
        replay_layout(0.01, 3, 512, seed=0),
    ]
    assert len({chunk_keys(layout, request(1))[0] for layout in layouts}) == 4
    assert len({bucket_name(layout) for layout in layouts}) == 4


def test_scale_one_is_the_model_and_slices_are_whole_words() -> None:
    assert replay_layout(1.0, 32, 512, 0).chunk_bytes == 64 << 20
    for scale in (1e-6, 0.005, 0.0123):
        assert replay_layout(scale, 1, 512, 0).per_layer_chunk_bytes % 8 == 0


def test_the_last_block_counts_only_the_tokens_that_it_holds() -> None:
    prompt = request(1, 2, 3, input_length=1100)
    assert [tokens_of(prompt, n, 512) for n in range(4)] == [0, 512, 1024, 1100]


def test_who_asked_first_is_told_for_what_a_store_that_loses_nothing_has() -> None:
    requests = [
        request(1, 2, 3),
        request(1, 2, 3),
        request(1, 2, 4),
        request(2, 3),  # the same ids behind another beginning are other blocks
        request(1, 2, 4, 5),
        request(1, 1),
    ]
    assert first_askers(requests) == [[], [0, 0, 0], [0, 0], [], [0, 0, 2], [0]]
