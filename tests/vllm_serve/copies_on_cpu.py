"""vLLM's offloading connector on a CPU: its own copies between device and host are for GPUs.

Scheduler, tiering manager and tiers are vLLM's own, and so is the host's memory. Only what copies
blocks to it and back is this module's, named by `spec_name` and `spec_module_path`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

Pair = tuple[torch.Tensor, torch.Tensor]


class CopiesOnCpu(OffloadingWorker):
    """Copies at once, so a job has ended when it was begun."""

    def __init__(self, pairs: Sequence[Pair], region: SharedOffloadRegion) -> None:
        """`pairs` are int8[blocks, page] of vLLM's KV cache and int8[chunks, page] of the host's
        memory, of which a chunk is one block.
        """
        self._pairs = pairs
        self._region = region
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for blocks, chunks in self._pairs:
            chunks[dst_spec.block_ids] = blocks[src_spec.block_ids]
        return self._end(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for blocks, chunks in self._pairs:
            blocks[dst_spec.block_ids] = chunks[src_spec.block_ids]
        return self._end(job_id)

    def _end(self, job_id: int) -> bool:
        self._ended.append(TransferResult(job_id, True, 0, 0.0))
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        return

    def shutdown(self) -> None:
        self._pairs = ()
        self._region.cleanup()


class TieringOnCpuSpec(TieringOffloadingSpec):
    """Several tiers, the first of which is filled from a CPU's KV cache."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        pairs = [
            (
                cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes),
                region.create_next_worker_view(cache.page_size_bytes),
            )
            for cache in kv_caches.tensors
        ]
        return CopiesOnCpu(pairs, region)
