"""The vLLM connector's decisions, without vLLM: lookups, steps and their verdicts, slots, names."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from objectcache.connectors.identity.adapters import Adapters
from objectcache.connectors.identity.namespace import KvNamespace
from objectcache.connectors.store.load_budget import LoadBudget
from objectcache.connectors.vllm import ObjectCacheConnector
from objectcache.connectors.vllm.before_schedule.parking_choice import ParkingChoice
from objectcache.connectors.vllm.geometry import EngineGeometry, read_geometry
from objectcache.connectors.vllm.load_mode import LoadMode
from objectcache.connectors.vllm.plans import LoadPlan, SavePlan, StepVerdicts
from objectcache.connectors.vllm.scheduler.lookups import Lookup, Lookups
from objectcache.connectors.vllm.scheduler.recently_saved import BLOCKS_MAX, VALID_S, RecentlySaved
from objectcache.connectors.vllm.scheduler.scheduler_side import SchedulerSide, SideRoles
from objectcache.connectors.vllm.scheduler.tainted import OpenSteps, TaintedBlocks
from objectcache.connectors.vllm.settings import VllmSettings, read_settings
from objectcache.connectors.vllm.worker import loads as loads_module
from objectcache.connectors.vllm.worker.arena import Arena
from objectcache.connectors.vllm.worker.block_copies import WaitedCopies
from objectcache.connectors.vllm.worker.loads import Loads
from objectcache.connectors.vllm.worker.paged_layout import runs
from objectcache.connectors.vllm.worker.saves import PIECE_BLOCKS_MAX, SavePiece, Saves, pieces
from objectcache.connectors.vllm.worker.staging import SlotStaging
from objectcache.connectors.vllm.worker.worker_side import numbered, ordered_names, staging_slots
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache_schemas.errors import DeliveryFailed, InvalidRequest, Unavailable
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.limits import GIB, KIB

G = 16
LAYERS = 4
BLOCK_BYTES = 16 * KIB
STEP_TOKENS_MAX = 512
RANK = KvNamespace("m", "r", "bf16", "l", "sha256_cbor")


# --- blocks and slots ---


def test_consecutive_blocks_are_copied_together() -> None:
    assert runs([4, 5, 6, 2, 8, 9]) == [(0, 3, 4), (3, 1, 2), (4, 2, 8)]
    assert runs([3, 2, 1]) == [(0, 1, 3), (1, 1, 2), (2, 1, 1)]
    assert runs([]) == []


def test_slots_that_come_back_join_their_neighbours() -> None:
    arena = Arena(10)
    first, second, third = arena.take(4), arena.take(3), arena.take(3)
    assert (first, second, third) == (0, 4, 7)
    assert arena.take(1) is None
    arena.give_back(0, 4)
    arena.give_back(7, 3)
    assert arena.free_count == 7
    assert arena.take(5) is None  # in two gaps
    arena.give_back(4, 3)
    assert arena.take(10) == 0
    assert repr(arena) == "<Arena 0/10 free>"


def test_a_long_prefix_is_put_in_pieces_that_name_what_is_before_them() -> None:
    count = PIECE_BLOCKS_MAX + 2
    hashes = tuple(bytes([number]) for number in range(count))
    plan = SavePlan("r", 3, tuple(range(count)), hashes, b"before", "w")
    (ids, names, parent), (rest_ids, rest_names, rest_parent) = pieces(plan)
    assert len(ids) == len(names) == PIECE_BLOCKS_MAX
    assert parent == b"before"
    assert rest_ids == (count - 2, count - 1)
    assert rest_names == hashes[-2:]
    assert rest_parent == hashes[PIECE_BLOCKS_MAX - 1]


def test_layers_are_in_the_order_of_their_numbers_not_of_their_names() -> None:
    names = [f"model.layers.{number}.attn" for number in (10, 9, 0)]
    assert ordered_names(dict.fromkeys(names)) == [names[2], names[1], names[0]]
    with pytest.raises(InvalidRequest, match=r"'model\.attn' has no one number"):
        ordered_names({"model.attn": None})


def test_layers_that_share_memory_are_stored_once() -> None:
    def tensor(address: int) -> Any:
        return SimpleNamespace(data_ptr=lambda: address, storage_offset=lambda: 0)

    first, second = tensor(100), tensor(200)
    caches = {"layers.2.a": tensor(100), "layers.0.a": first, "layers.1.a": second}
    numbers, tensors = numbered(caches)
    assert numbers == {"layers.0.a": 0, "layers.1.a": 1}
    assert tensors == [first, second]


def test_staging_memory_holds_one_block_at_least_and_no_more_than_there_are() -> None:
    settings = VllmSettings(staging_bytes_max=1000)
    assert staging_slots(settings, 100, 64) == 10
    assert staging_slots(settings, 100, 4) == 4
    with pytest.raises(InvalidRequest, match="one block of this model needs 1001 bytes"):
        staging_slots(settings, 1001, 4)


# --- verdicts ---


def test_a_step_without_saves_needs_no_verdict() -> None:
    verdicts = StepVerdicts()
    verdicts.issue(saves=False)
    step = verdicts.issue(saves=True)
    verdicts.reported({1, step}, failed=False)
    assert verdicts.take() == ((step,), ())
    assert verdicts.take() == ((), ())


def test_a_failed_load_spoils_the_steps_that_were_under_way_with_it() -> None:
    verdicts = StepVerdicts()
    whole = verdicts.issue(saves=True)
    failing = verdicts.issue(saves=True)
    verdicts.reported({whole}, failed=False)
    behind = verdicts.issue(saves=True)  # scheduled before the failure was heard of
    verdicts.reported({failing}, failed=True)
    afterwards = verdicts.issue(saves=True)
    verdicts.reported({behind, afterwards}, failed=False)
    assert verdicts.take() == ((whole, afterwards), (failing, behind))


def test_blocks_are_saved_again_after_a_while_or_when_they_were_not_stored() -> None:
    recent = RecentlySaved()
    recent.add([b"a", b"b"], now_s=0.0)
    recent.forget([b"b", b"c"])
    assert recent.has(b"a", VALID_S - 1)
    assert not recent.has(b"a", VALID_S)
    assert not recent.has(b"b", 1.0)
    recent.add((number.to_bytes(4) for number in range(BLOCKS_MAX)), now_s=1.0)
    assert not recent.has(b"a", 1.0)
    assert repr(recent) == f"<RecentlySaved {BLOCKS_MAX} blocks>"


# --- blocks of failed loads ---


def test_what_comes_behind_a_failed_block_is_tainted_in_every_table_that_shares_it() -> None:
    tainted = TaintedBlocks()
    tainted.failed({2}, [(9, 7, 8), (1, 2, 7), (5, 6)])
    assert [tainted.first_in((block,)) for block in range(1, 10)] == [
        None, 0, None, None, None, None, 0, 0, None,
    ]  # fmt: skip


def test_a_tainted_block_is_right_again_once_it_is_computed_on_right_ones() -> None:
    tainted = TaintedBlocks()
    tainted.failed({2, 3}, [])
    table = (1, 2, 3, 4)
    assert not tainted.step(table, (), begin=3, end=4)  # reads both
    assert tainted.first_in((4,)) == 0
    assert tainted.step(table, (), begin=1, end=2)
    assert tainted.step(table, (), begin=2, end=4)
    assert len(tainted) == 0
    tainted.failed({2}, [])
    assert tainted.step(table, (2,), begin=2, end=4)  # loaded again
    assert len(tainted) == 0


def test_tables_are_kept_only_while_a_load_is_under_way() -> None:
    steps = OpenSteps()
    steps.begins("before", loads=False)
    steps.planned(1, loads=False, scheduled=["before"], blocks=Tables())
    assert steps.tables() == []
    steps.begins("loading", loads=True)
    steps.planned(2, loads=True, scheduled=["before", "loading"], blocks=Tables())
    steps.begins("behind", loads=False)
    steps.planned(3, loads=False, scheduled=["before", "behind"], blocks=Tables())
    assert len(steps.tables()) == 2
    steps.reported({1})
    assert len(steps.tables()) == 2
    steps.reported({2})
    assert steps.tables() == []


# --- lookups ---


def test_an_answer_that_takes_too_long_counts_as_nothing_stored() -> None:
    answer: Future[int] = Future()
    lookup = Lookup(answer, started_s=10.0, timeout_s=0.5)
    assert lookup.result(10.4) is None
    assert lookup.result(10.5) == 0
    late: Future[int] = Future()
    late.set_result(3)
    assert Lookup(late, started_s=10.0, timeout_s=0.5).result(99.0) == 3


def test_lookups_beyond_the_pause_ask_nothing() -> None:
    asked: list[Sequence[str]] = []

    def match(keys: Sequence[str]) -> int:
        asked.append(keys)
        raise Unavailable("no server")

    lookups = Lookups(match, timeout_s=30.0)
    first = lookups.begin([RANK], [b"a"])
    assert first._answer is not None
    assert first._answer.result(30.0) == 0
    assert lookups.begin([RANK], [b"b"]).result(0.0) == 0
    assert lookups.begin([RANK], []).result(0.0) == 0
    assert asked == [RANK.keys([b"a"])]
    assert lookups.failures == 1
    lookups.close()


def test_a_defect_in_a_lookup_counts_as_nothing_stored() -> None:
    def match(keys: Sequence[str]) -> int:
        raise RuntimeError("a defect")

    lookups = Lookups(match, timeout_s=30.0)
    lookup = lookups.begin([RANK], [b"a"])
    assert lookup._answer is not None
    assert lookup._answer.result(30.0) == 0
    assert lookup.result(0.0) == 0
    assert lookups.failures == 1
    lookups.close()


def test_keys_of_all_ranks_are_made_beside_the_scheduler_and_none_is_left_out() -> None:
    asked: list[tuple[int, int]] = []

    def match(keys: Sequence[str]) -> int:
        asked.append((threading.get_ident(), len(keys)))
        return len(keys) - 1

    lookups = Lookups(match, timeout_s=30.0)
    ranks = geometry_of(tensor_ranks=8).namespaces
    lookup = lookups.begin(ranks, [number.to_bytes(4) for number in range(9000)])
    assert lookup._answer is not None
    assert lookup._answer.result(30.0) == 8999
    ((thread, count),) = asked
    assert thread != threading.get_ident()
    assert count == 8 * 9000
    lookups.close()


# --- loads ---


class Clock:
    """Time that goes on only when it is told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


class SlowDelivery:
    """Each layer takes so long, or as long as it is waited for."""

    chunk_count, slice_bytes, layers = 2, 8, range(32)
    progress = LayerProgress(0, 32)

    def __init__(self, clock: Clock, layer_s: float) -> None:
        self._clock = clock
        self._layer_s = layer_s

    def fetched(self, plan: LoadPlan) -> Any:
        return self

    def wait_layer(self, layer: int, timeout_s: float) -> Any:
        self._clock.now_s += min(self._layer_s, timeout_s)
        if timeout_s < self._layer_s:
            raise DeliveryFailed("too late", layer=layer)
        return np.zeros((2, 8), np.uint8)

    def close(self) -> None:
        pass


def test_a_server_that_is_late_with_every_layer_costs_a_step_one_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(loads_module, "time", clock)
    layers = [SimpleNamespace(load=lambda blocks, slices: None) for _ in range(32)]
    plan = LoadPlan("r", (3, 4), (b"a", b"b"), 100, "w")
    for layer_s, failed, waited_s in ((9.0, {3, 4}, 10.0), (0.25, set[int](), 8.0)):
        delivery: Any = SlowDelivery(clock, layer_s)
        loads = Loads(delivery.fetched, WaitedCopies(cast("Any", layers)), timeout_s=10.0)
        loads.start([plan])
        begun_s = clock.now_s
        for layer in range(32):
            clock.now_s += 1.0  # the model computes
            loads.wait(layer)
        loads.end_step()
        assert loads.take_failed_blocks() == failed
        assert clock.now_s - begun_s == 32.0 + waited_s
        loads.close()


# --- saves ---


class HeldTarget:
    """Registered memory that the server may, or may not, be through with."""

    def __init__(self, length_bytes: int) -> None:
        self.array = np.zeros(length_bytes, np.uint8)
        self.is_lost = self.is_read = self.closed = False

    def chunks(self, count: int, layout: KvLayout) -> Any:
        return self.array.reshape(count, layout.num_layers, layout.per_layer_chunk_bytes)

    def close(self) -> None:
        self.closed = True


LAYOUT = KvLayout(
    num_layers=1, chunk_tokens=G, per_layer_chunk_bytes=8, dtype="bf16", fingerprint="f"
)


@pytest.mark.parametrize("fault", ["is_lost", "is_read"])
def test_memory_that_the_server_may_still_read_is_not_written_again(fault: str) -> None:
    made: list[HeldTarget] = []

    def register(length_bytes: int) -> Any:
        made.append(HeldTarget(length_bytes))
        return made[-1]

    went_wrong = threading.Event()
    go_on = threading.Event()

    def put(piece: SavePiece, chunks: Any) -> None:
        if not went_wrong.is_set():
            setattr(made[0], fault, True)
            went_wrong.set()
            assert go_on.wait(30.0)
            raise Unavailable("no answer")

    layer: Any = SimpleNamespace(store=lambda blocks, slices: None)
    saves = Saves(put, WaitedCopies([layer]), SlotStaging(register, 4, LAYOUT))

    def save(step: int) -> None:
        saves.start([SavePlan("r", 0, (1,), (bytes([step]),), None, "w")])
        saves.save(0)
        saves.end_step(step)

    save(1)
    save(2)
    saves.decided((1,), ())
    assert went_wrong.wait(30.0)
    go_on.set()
    while not saves._draining:
        threading.Event().wait(0.001)
    save(3)  # finds no slot: the second step's piece is in the memory still
    assert saves.dropped_blocks == 1
    assert len(made) == 1
    saves.decided((2,), ())
    while saves._draining:
        threading.Event().wait(0.001)
    assert made[0].closed
    save(4)
    saves.decided((4,), ())
    assert saves.wait_stored(10.0)
    assert len(made) == 2
    assert saves.saved_blocks == 2
    saves.close()
    assert made[1].closed


# --- the scheduler's side ---


class Asked:
    """A store that says what it is told to, when it is told to."""

    def __init__(self) -> None:
        self.matched = 0
        self.keys: list[Sequence[str]] = []
        self.released = threading.Event()
        self.released.set()

    def match(self, keys: Sequence[str]) -> int:
        self.keys.append(keys)
        assert self.released.wait(30.0)
        return self.matched


def request_of(blocks: int, tokens: int, name: str = "r") -> Any:
    """As vLLM's request, as far as the connector looks."""
    return SimpleNamespace(
        request_id=name,
        num_tokens=tokens,
        num_prompt_tokens=tokens,
        num_computed_tokens=0,
        block_hashes=[bytes([number]) * 32 for number in range(blocks)],
        skip_reading_prefix_cache=False,
        lora_request=None,
    )


def geometry_of(tensor_ranks: int = 1, rank: int = 0, latent: bool = False, **changed: Any) -> Any:
    """The geometry of an engine whose configuration has these values."""
    kind = "MLAAttentionSpec" if latent else "FullAttentionSpec"
    spec = type(kind, (), {})()
    values = {
        "block_size": G,
        "num_kv_heads": 2,
        "head_size": 8,
        "head_size_v": 0 if latent else 8,
        "unpadded_page_size_bytes": 1024,
        "tokens_per_state": 1,
    }
    for name, value in values.items():
        setattr(spec, name, value)
    options = {
        "model": "some/model",
        "algo": "sha256_cbor",
        "cache_dtype": "auto",
        "pipeline": 1,
        "draft": None,
        "hash_block_size": None,
        "theta": 1e4,
        "decode_context": 1,
        **changed,
    }
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tensor_ranks,
            pipeline_parallel_size=options["pipeline"],
            decode_context_parallel_size=options["decode_context"],
            rank=rank,
        ),
        model_config=SimpleNamespace(
            model=options["model"],
            dtype="torch.bfloat16",
            revision=None,
            hf_config_path=None,
            quantization=None,
            get_total_num_hidden_layers=lambda: 4,
            hf_config={"rope_theta": options["theta"]},
        ),
        cache_config=SimpleNamespace(
            prefix_caching_hash_algo=options["algo"], cache_dtype=options["cache_dtype"]
        ),
        speculative_config=options["draft"],
    )
    cache_config = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)],
        hash_block_size=options["hash_block_size"],
    )
    return read_geometry(vllm_config, cache_config, "r1", "0.33.0", {})


def side_of(
    store: Asked,
    geometry: EngineGeometry | None = None,
    load_bytes_max: int = GIB,
    mode: LoadMode = LoadMode.LAYERWISE,
) -> SchedulerSide:
    return SchedulerSide(
        geometry or geometry_of(),
        Lookups(store.match, timeout_s=10.0),
        SideRoles(loads=True, saves=True, mode=mode),
        G,
        Adapters({}),
        LoadBudget(load_bytes_max, BLOCK_BYTES),
        ParkingChoice(LAYERS, BLOCK_BYTES, STEP_TOKENS_MAX),
    )


def tokens_once_known(side: SchedulerSide, request: Any, computed: int) -> int:
    """What is matched when the answer is there."""
    answer = side._tracked[request.request_id].lookup._answer
    assert answer is not None
    answer.result(30.0)
    tokens = side.matched_tokens(request, computed)
    assert tokens is not None
    return tokens


class Tables:
    """Block tables of requests: block number 100 + place."""

    def get_block_ids(self, name: str) -> tuple[list[int]]:
        return ([100 + place for place in range(50)],)


def test_a_request_is_asked_about_when_it_arrives_and_the_scheduler_never_waits() -> None:
    store = Asked()
    store.released.clear()
    store.matched = 2
    side = side_of(store)
    request = request_of(blocks=3, tokens=50)
    side.arrived(request)
    assert side.matched_tokens(request, 0) is None
    store.released.set()
    assert tokens_once_known(side, request, 0) == 32
    assert side.matched_tokens(request, 16) == 16
    assert side.matched_tokens(request, 32) == 0
    assert len(store.keys) == 1
    side.close()


def test_a_prefix_counts_only_as_far_as_every_rank_has_it() -> None:
    store = Asked()
    side = side_of(store, geometry_of(tensor_ranks=2))
    store.matched = 5  # of 6 keys: the second rank lacks its third block
    request = request_of(blocks=3, tokens=50)
    side.arrived(request)
    assert tokens_once_known(side, request, 0) == 32
    assert len(store.keys[0]) == 6
    assert len({key.rsplit("/", 1)[0] for key in store.keys[0]}) == 2
    side.close()


@pytest.mark.parametrize(
    ("parameters", "relay"),
    [
        ({"objectcache": {"relay": "d3"}, "do_remote_prefill": True}, "d3"),
        ({"objectcache": {"relay": 7}}, ""),
        ({"objectcache": {"relay": "d" * 300}}, ""),
        ({"objectcache": "d3"}, ""),
        ({}, ""),
        ("d3", ""),
        (None, ""),
    ],
)
def test_the_relay_that_a_router_names_goes_with_the_load(parameters: Any, relay: str) -> None:
    store = Asked()
    store.matched = 3
    side = side_of(store)
    request = request_of(blocks=3, tokens=50)
    request.kv_transfer_params = parameters
    side.arrived(request)
    assert tokens_once_known(side, request, 16) == 32
    side.allocated(request, [7, 8, 9, 10], 32)
    (load,) = side.plan({}, Tables()).loads
    assert load.relay == relay
    side.close()


def test_the_load_of_a_request_begins_behind_what_the_engine_has() -> None:
    store = Asked()
    store.matched = 3
    side = side_of(store)
    request = request_of(blocks=3, tokens=50)
    side.arrived(request)
    assert tokens_once_known(side, request, 16) == 32
    side.allocated(request, [7, 8, 9, 10], 32)
    plan = side.plan({}, Tables())
    (load,) = plan.loads
    assert load.block_ids == (8, 9)
    assert load.hashes == tuple(request.block_hashes[1:3])
    assert load.context_tokens == 50
    assert side.plan({}, Tables()).loads == ()
    side.close()


def test_of_a_prefix_that_is_too_long_to_load_as_much_counts_as_can_be_loaded() -> None:
    store = Asked()
    store.matched = 20
    side = side_of(store, load_bytes_max=8 * BLOCK_BYTES)
    request = request_of(blocks=20, tokens=400)
    side.arrived(request)
    assert tokens_once_known(side, request, 0) == 8 * G
    assert side.matched_tokens(request, 3 * G) == 8 * G
    assert side.matched_tokens(request, 15 * G) == 5 * G
    side.allocated(request, list(range(25)), 5 * G)
    (load,) = side.plan({}, Tables()).loads
    assert load.block_ids == (15, 16, 17, 18, 19)
    side.close()


def test_what_a_step_cannot_load_beside_other_loads_waits_for_the_next_step() -> None:
    store = Asked()
    store.matched = 20
    side = side_of(store, load_bytes_max=8 * BLOCK_BYTES)
    names = ("first", "second", "small")
    requests = {name: request_of(20, 400, name) for name in names}
    for request in requests.values():
        side.arrived(request)
    assert tokens_once_known(side, requests["first"], 16 * G) == 4 * G
    side.allocated(requests["first"], list(range(25)), 4 * G)
    assert tokens_or_none(side, requests["second"]) is None
    assert tokens_or_none(side, requests["small"], 16 * G) == 4 * G
    side.allocated(requests["small"], list(range(25)), 4 * G)
    assert [load.request_id for load in side.plan({}, Tables()).loads] == ["first", "small"]
    assert tokens_or_none(side, requests["second"]) == 8 * G
    side.close()


def tokens_or_none(side: SchedulerSide, request: Any, computed: int = 0) -> int | None:
    """What is matched when the answer is there; None: in a later step."""
    answer = side._tracked[request.request_id].lookup._answer
    assert answer is not None
    answer.result(30.0)
    return side.matched_tokens(request, computed)


def test_full_blocks_of_the_prompt_are_saved_once_from_the_first_that_is_not_stored() -> None:
    store = Asked()
    store.matched = 1
    side = side_of(store)
    request = request_of(blocks=5, tokens=70)
    side.arrived(request)
    assert tokens_once_known(side, request, 0) == 16
    request.num_computed_tokens = 16
    (save,) = side.plan({"r": 20}, Tables()).saves  # 36 tokens: two blocks and a bit
    assert (save.first, save.block_ids) == (1, (101,))
    assert save.parent == request.block_hashes[0]
    request.num_computed_tokens = 36
    (save,) = side.plan({"r": 34}, Tables()).saves
    assert (save.first, save.block_ids) == (2, (102, 103))
    request.num_computed_tokens = 70
    assert side.plan({"r": 30}, Tables()).saves == ()  # answers are no part of the prompt
    side.close()


def test_after_a_failed_load_its_blocks_are_saved_as_they_are_computed() -> None:
    store = Asked()
    store.matched = 2
    side = side_of(store)
    request = request_of(blocks=3, tokens=50)
    side.arrived(request)
    assert tokens_once_known(side, request, 0) == 32
    side.allocated(request, [100, 101, 102, 103], 32)
    request.num_computed_tokens = 32
    plan = side.plan({"r": 18}, Tables())
    assert [save.block_ids for save in plan.saves] == [(102,)]
    side.reported({plan.step}, {100, 101})
    request.num_computed_tokens = 0  # vLLM computes it again
    again = side.plan({"r": 50}, Tables())
    assert again.bad == (plan.step,)
    assert [save.block_ids for save in again.saves] == [(100, 101, 102)]
    side.close()


def test_a_request_that_is_gone_leaves_nothing_behind() -> None:
    side = side_of(Asked())
    request = request_of(blocks=3, tokens=50)
    side.arrived(request)
    side.finished("r")
    side.finished("r")
    assert side.plan({"r": 50}, Tables()).saves == ()
    assert repr(side) == "<SchedulerSide 0 requests, 0 tokens hit, 0 lookups failed>"
    side.close()


# --- names ---


def test_ranks_of_a_latent_share_what_one_of_them_stores() -> None:
    for rank in range(2):
        geometry = geometry_of(tensor_ranks=2, rank=rank, latent=True)
        assert len(geometry.namespaces) == 1
        assert geometry.stores is (rank == 0)
    assert geometry_of(latent=True).namespace == geometry.namespace
    stages = geometry_of(tensor_ranks=2, rank=3, latent=True, pipeline=2)
    assert (stages.rank, len(stages.namespaces), stages.stores) == (1, 2, False)


def test_every_other_rank_stores_a_part_of_its_own() -> None:
    prefixes = {geometry_of(tensor_ranks=2, rank=rank).namespace.prefix for rank in range(2)}
    assert len(prefixes) == 2
    assert geometry_of(tensor_ranks=2, rank=3, pipeline=2).rank == 3
    assert geometry_of().namespace.prefix not in prefixes


@pytest.mark.parametrize(
    "changed",
    [{"model": "other/model"}, {"algo": "sha256"}, {"cache_dtype": "fp8"}, {"theta": 5e5}],
)
def test_what_changes_the_bytes_changes_the_names(changed: dict[str, Any]) -> None:
    assert geometry_of(**changed).namespace.prefix != geometry_of().namespace.prefix


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"algo": "xxhash_cbor"}, "prefix-caching-hash-algo xxhash_cbor"),
        ({"cache_dtype": "fp8_per_token_head"}, "kv-cache-dtype fp8_per_token_head"),
        ({"draft": SimpleNamespace(method="eagle")}, "speculative decoding by eagle"),
        ({"hash_block_size": 8}, "hashed by 8"),
        ({"decode_context": 2}, "decode_context_parallel_size must be 1"),
    ],
)
def test_an_engine_that_cannot_be_served_is_told_why(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        geometry_of(**changed)


def test_ranks_that_are_split_in_another_way_have_other_names() -> None:
    wide = geometry_of(tensor_ranks=4)
    deep = geometry_of(tensor_ranks=2, pipeline=2)
    assert len(wide.namespaces) == len(deep.namespaces)
    assert wide.namespace.prefix != deep.namespace.prefix


def test_drafts_without_kv_of_their_own_are_served() -> None:
    assert geometry_of(draft=SimpleNamespace(method="ngram")).namespace == geometry_of().namespace


# --- settings ---


def test_the_connectors_settings_stand_beside_the_stores() -> None:
    values = {
        "endpoint": "http://127.0.0.1:1",
        "bucket": "kv-cache",
        "access_key": "a",
        "secret_key": "s",
        "fetch_tokens_min": 7,
        "timeout_s": 3,
    }
    settings, configuration = read_settings(values)
    assert settings.fetch_tokens_min == 7
    assert settings.load_timeout_s == VllmSettings().load_timeout_s
    assert (configuration.bucket, configuration.timeout_s) == ("kv-cache", 3)
    with pytest.raises(InvalidRequest, match="'fetch_token_min' is unknown"):
        read_settings({**values, "fetch_token_min": 7})


def test_without_vllm_the_connector_says_what_is_missing() -> None:
    if ObjectCacheConnector.__mro__[1].__name__ != "MissingEngine":
        pytest.skip("vllm is installed here")
    with pytest.raises(Unavailable, match="needs vllm in the same environment"):
        ObjectCacheConnector(None, None, None)
