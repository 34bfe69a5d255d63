"""A small vLLM engine on the CPU: real scheduler and connector, and a model that only writes KV.

The model's KV of a token is a function of the tokens up to it and of the layer, in bytes, so that
a block from the store can be told from every other one. It reads what was loaded, as attention
does: where that is not what the model would have computed, what it computes is garbage.
"""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_TOKENS = 16
LAYERS = 4
HEADS = 2
WIDTH = 32
LATENT_WIDTH = 576
BLOCKS = 64
SAMPLED = 7  # the token that the model always answers with
STEPS_MAX = 2000
WAIT_S = 30.0

ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


def model_directory(parent: Path, layers: int = LAYERS) -> Path:
    """A model's configuration, and nothing else of it."""
    directory = parent / "model"
    directory.mkdir(exist_ok=True)
    document = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": HEADS,
        "head_dim": WIDTH,
        "vocab_size": 1000,
        "max_position_embeddings": 32768,
        "torch_dtype": "bfloat16",
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(document))
    return directory


class EngineConfigs:
    """What vLLM is started with; its model's configuration is read once, which takes seconds."""

    asynchronous: bool = False  # scheduling, of the configurations that are made from now on

    def __init__(self, model: Path, tokens_max: int = 2048, step_tokens_max: int = 512) -> None:
        self._tokens_max = tokens_max
        self._step_tokens_max = step_tokens_max
        self._model_config = ModelConfig(
            str(model), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=tokens_max
        )

    def vllm_config(self, extra: dict[str, Any], **transfer: Any) -> VllmConfig:
        """A configuration with the connector, and with `extra` as its own."""
        chosen = {
            "kv_connector": "ObjectCacheConnector",
            "kv_connector_module_path": "objectcache.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
            **transfer,
        }
        return VllmConfig(
            model_config=self._model_config,
            cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8,
                max_num_batched_tokens=self._step_tokens_max,
                max_model_len=self._tokens_max,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
                async_scheduling=self.asynchronous,
            ),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(**chosen),
        )


def layer_names(count: int = LAYERS) -> list[str]:
    """As vLLM names them."""
    return [f"model.layers.{number}.self_attn.attn" for number in range(count)]


def kv_cache_config(
    latent: bool = False, blocks: int = BLOCKS, layers: int = LAYERS
) -> KVCacheConfig:
    """One group of layers with so many blocks."""
    spec = (
        MLAAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=LATENT_WIDTH, dtype=torch.bfloat16
        )
        if latent
        else FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=HEADS, head_size=WIDTH, dtype=torch.bfloat16
        )
    )
    return KVCacheConfig(blocks, [], [KVCacheGroupSpec(layer_names(layers), spec)])


def paged_tensors(
    order: str = "LBNHC", latent: bool = False, blocks: int = BLOCKS, layers: int = LAYERS
) -> dict[str, torch.Tensor]:
    """The registered tensors: logical [B, H, N, C] of each layer, in a physical order."""
    shape = (layers, blocks, *((1, BLOCK_TOKENS, LATENT_WIDTH) if latent else _SHAPE))
    axes = ORDERS[order]
    pool = torch.zeros([shape[axis] for axis in axes], dtype=torch.bfloat16)
    logical = pool.permute([axes.index(axis) for axis in range(5)])
    return dict(zip(layer_names(layers), logical, strict=True))


_SHAPE = (HEADS, BLOCK_TOKENS, 2 * WIDTH)
_SIGN_AND_MANTISSA = np.uint16(0x80FF)
_EXPONENT = np.uint16(0x3F00)  # of 0.5 to 2


def token_kv(tokens: Sequence[int], position: int, layer: int, elements: int) -> torch.Tensor:
    """KV of the token at a position: noise that follows from all that it depends on, of like
    magnitudes, as KV is, so that it can be stored in fewer bytes.
    """
    history = np.asarray(tokens[: position + 1], np.uint32).tobytes()
    noise = hashlib.shake_128(history + bytes([layer])).digest(2 * elements)
    numbers = np.frombuffer(noise, np.uint16) & _SIGN_AND_MANTISSA | _EXPONENT
    return torch.from_numpy(numbers).view(torch.bfloat16)


def same_bytes(held: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes; numbers would differ where they are none."""
    flat = held.contiguous().view(torch.uint8).flatten()
    return bool(torch.equal(flat, expected.view(torch.uint8)))


def _samples_of(output: ModelRunnerOutput) -> Counter[str]:
    names = zip(output.req_ids, output.sampled_token_ids, strict=True)
    return Counter({name: len(tokens) for name, tokens in names})


class Engine:
    """Scheduler, connectors and workers of one vLLM engine, stepped by hand.

    More tensors than one rank's make an engine of so many tensor-parallel ranks, each with KV of
    its own. What one of them reads is part of what all compute.
    """

    def __init__(
        self,
        config: VllmConfig,
        caches: dict[str, torch.Tensor],
        *more_ranks: dict[str, torch.Tensor],
        latent: bool = False,
        computes: bool = True,
    ) -> None:
        """Without `computes` the model writes nothing."""
        config.parallel_config.tensor_parallel_size = 1 + len(more_ranks)
        blocks = len(next(iter(caches.values())))
        cache_config = kv_cache_config(latent, blocks, len(caches))
        self._names = list(caches)
        config.cache_config.num_gpu_blocks = blocks
        self._computes = computes
        kind = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
        self.scheduler = kind(
            config,
            cache_config,
            StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        self.workers: list[tuple[Any, dict[str, torch.Tensor]]] = []
        for rank, its_caches in enumerate((caches, *more_ranks)):
            its_config = copy.copy(config)
            its_config.parallel_config = copy.copy(config.parallel_config)
            its_config.parallel_config.rank = rank
            worker = KVConnectorFactory.create_connector(
                its_config, KVConnectorRole.WORKER, cache_config
            )
            worker.register_kv_caches(its_caches)
            self.workers.append((worker, its_caches))
        self.worker = self.workers[0][0]
        self._aggregator = KVOutputAggregator(len(self.workers))
        hash_name = config.cache_config.prefix_caching_hash_algo
        hash_function = get_hash_fn_by_name(hash_name)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, hash_function)
        self.failed_blocks: set[int] = set()
        self.computed_tokens = 0
        self.stats: list[Any] = []  # of the workers and the scheduler, a step each
        self._count_what_the_scheduler_takes()
        self.tables: dict[str, list[int]] = {}  # of each request's last step
        self._wrong: dict[str, list[int]] = {}
        self.loaded_tokens: dict[str, int] = {}
        self._loads: dict[str, Any] = {}  # of this step
        self.is_strict = True
        self.samples_under_way: Counter[str] = Counter()  # tokens that the scheduler has not heard
        self.before_loads: Any = None  # called before a step that loads
        self.before_layer: Any = None  # called with each layer's number
        self.layer_s: Any = None  # of a step's output: how long the model computes on a layer
        self.clock: Any = time  # by which it does
        self.layers_s: dict[str, list[float]] = {}  # from one wait to the next, by what is loaded

    def request(
        self, name: str, tokens: Sequence[int], answer_tokens: int = 1, salt: str | None = None
    ) -> Request:
        """A request for so many tokens, its blocks hashed."""
        parameters = SamplingParams(max_tokens=answer_tokens, temperature=0.0)
        parameters.update_from_generation_config({}, eos_token_id=2)
        return Request(
            name, list(tokens), parameters, None, block_hasher=self._hasher, cache_salt=salt
        )

    def add(
        self, name: str, tokens: Sequence[int], answer_tokens: int = 1, salt: str | None = None
    ) -> Request:
        """Give the scheduler a request."""
        request = self.request(name, tokens, answer_tokens, salt)
        self.scheduler.add_request(request)
        return request

    def run(self) -> None:
        """Step until every request is finished, and its end was told to the worker."""
        deadline_s = time.monotonic() + WAIT_S
        while self.scheduler.has_requests():
            self.step()
            assert time.monotonic() < deadline_s, "the engine does not come to an end"
        self.step()

    def answer(self, name: str, tokens: Sequence[int]) -> int:
        """Run one request; how many of its tokens came from the store."""
        self.add(name, tokens)
        self.run()
        return self.loaded_tokens.get(name, 0)

    def step(self) -> Any:
        """Schedule, compute, and tell the scheduler what came of it."""
        output = self.scheduler.schedule()
        self.carry_out(output)
        return output

    def run_ahead(self, after_each: Any = None) -> None:
        """As `run`, but each step is scheduled and computed before the scheduler hears what came of
        the one before, as it is under vLLM's asynchronous scheduling. `after_each` is called after
        each step that was computed.
        """
        deadline_s = time.monotonic() + WAIT_S
        under_way: list[tuple[Any, ModelRunnerOutput]] = []
        while self.scheduler.has_requests():
            output = self.scheduler.schedule()
            under_way.append((output, self.compute(output)))
            if after_each is not None:
                after_each()
            if len(under_way) > 1:
                self.scheduler.update_from_output(*under_way.pop(0))
            self.samples_under_way = sum((_samples_of(step) for _, step in under_way), Counter())
            assert time.monotonic() < deadline_s, "the engine does not come to an end"
        for step in under_way:
            self.scheduler.update_from_output(*step)
        self.samples_under_way = Counter()
        self.step()

    def carry_out(self, output: Any) -> None:
        """Compute what was scheduled, and tell the scheduler what came of it."""
        self.scheduler.update_from_output(output, self.compute(output))

    def compute(self, output: Any) -> ModelRunnerOutput:
        """Compute what was scheduled; what all workers report of it, together.

        Raises IndexError where it is more tokens than the request has, as a model runner does; not
        without `is_strict`.
        """
        for name in output.num_scheduled_tokens:
            request = self.scheduler.requests[name]
            known = request.num_tokens + self.samples_under_way[name]
            if request.num_computed_tokens > known and self.is_strict:
                raise IndexError(f"request {name} has no token {known}")
        metadata = output.kv_connector_metadata
        loads = (*metadata.plan.loads, *metadata.plan.parked)
        self._loads = {load.request_id: load for load in loads}
        for load in self._loads.values():
            self.loaded_tokens[load.request_id] = BLOCK_TOKENS * len(load.block_ids)
        if self._loads and self.before_loads is not None:
            self.before_loads()
        for worker, _ in self.workers:
            worker.bind_connector_metadata(metadata)
            if output.has_sync_kv_loads:
                worker.start_load_kv(None)
        self.layers_s |= {name: [] for name in self._loads}
        if output.total_num_scheduled_tokens:
            for number, name in enumerate(self._names):
                self._layer(output, number, name)
        for worker, _ in self.workers:
            if not output.has_sync_kv_loads:
                worker.start_load_kv(None)
        for name in output.num_scheduled_tokens if self._computes else ():
            self._check(self.scheduler.requests[name])
        self.computed_tokens += output.total_num_scheduled_tokens
        reports: list[ModelRunnerOutput | None] = [
            self._sampled(output, self._told(worker, output)) for worker, _ in self.workers
        ]
        told = self._aggregator.aggregate(reports)
        assert told is not None
        assert told.kv_connector_output is not None
        self.failed_blocks |= told.kv_connector_output.invalid_block_ids
        self._count(told.kv_connector_output.kv_connector_stats)
        self.scheduler.connector.get_kv_connector_stats()
        return told

    def _count_what_the_scheduler_takes(self) -> None:
        """Whoever asks the scheduler's side: vLLM does too, when it is told of a step."""
        connector = self.scheduler.connector
        take = connector.get_kv_connector_stats
        connector.get_kv_connector_stats = lambda: self._count(take())

    def _count(self, stats: Any) -> Any:
        if stats is not None:
            self.stats.append(copy.deepcopy(stats))  # vLLM adds others to what it is given
        return stats

    def _layer(self, output: Any, number: int, name: str) -> None:
        if self.before_layer is not None:
            self.before_layer(number)
        for worker, _ in self.workers:
            worker.wait_for_layer_load(name)
        begun_s = self.clock.monotonic()
        if self.layer_s is not None:
            self.clock.sleep(self.layer_s(output))
        if self._computes:
            self._compute(output, number, name)
        for worker, caches in self.workers:
            worker.save_kv_layer(name, caches[name], None)
        took_s = self.clock.monotonic() - begun_s
        for loading in self._loads:
            self.layers_s[loading].append(took_s)

    def _told(self, worker: Any, output: Any) -> KVConnectorOutput:
        """What a worker reports, asked in the order in which vLLM's model runner asks."""
        told = KVConnectorOutput()
        worker.wait_for_save()
        transfers = worker.get_transfer_results(output.finished_req_ids)
        told.finished_recving = transfers.finished_recving
        told.invalid_block_ids = worker.get_block_ids_with_load_errors()
        told.kv_connector_stats = worker.get_kv_connector_stats()
        told.kv_connector_worker_meta = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        return told

    def _compute(self, output: Any, layer: int, name: str) -> None:
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            end = request.num_computed_tokens  # the scheduler has counted the step already
            table = self.scheduler.kv_cache_manager.get_block_ids(request_id)[0]
            self.tables[request_id] = list(table)
            garbage = self._reads_garbage(request, end - count, layer, name)
            for position in range(end - count, end):
                for held, expected in self._places(request, position, layer, name):
                    right = torch.zeros_like(expected) if garbage else expected
                    held.copy_(right.view(held.shape))

    def _places(
        self, request: Request, position: int, layer: int, name: str
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """On every rank: where a token's KV is held, and what it should be."""
        table = self.tables[request.request_id]
        block, row = table[position // BLOCK_TOKENS], position % BLOCK_TOKENS
        places = []
        for rank, (_, caches) in enumerate(self.workers):
            held = caches[name][block, :, row]
            number = layer + LAYERS * rank
            places.append((held, token_kv(request.all_token_ids, position, number, held.numel())))
        return places

    def _reads_garbage(self, request: Request, before: int, layer: int, name: str) -> bool:
        """Whether a block that is read, wherever it is from, begins with another token's KV."""
        return not all(
            same_bytes(held, expected)
            for position in range(0, before, BLOCK_TOKENS)
            for held, expected in self._places(request, position, layer, name)
        )

    def _sampled(self, output: Any, told: KVConnectorOutput) -> ModelRunnerOutput:
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self.scheduler.requests[name]
            done = request.num_computed_tokens >= request.num_tokens
            sampled.append([SAMPLED] if done else [])
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=told,
        )

    def wrong_positions(self, request: Request) -> list[int]:
        """Positions of the prompt whose KV was not what the model computes, when it was whole."""
        return self._wrong[request.request_id]

    def _check(self, request: Request) -> None:
        count = request.num_prompt_tokens
        if request.num_computed_tokens < count or request.num_output_tokens:
            return
        self._wrong[request.request_id] = [
            position
            for position in range(count)
            if not all(
                same_bytes(held, expected)
                for layer, name in enumerate(self._names)
                for held, expected in self._places(request, position, layer, name)
            )
        ]

    def saved(self) -> None:
        """Wait until what was saved is stored."""
        for worker, _ in self.workers:
            assert worker._worker.saves.wait_stored(WAIT_S)

    def close(self) -> None:
        """End both sides."""
        for worker, _ in self.workers:
            worker.shutdown()
        self.scheduler.shutdown()
