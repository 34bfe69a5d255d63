"""`vllm serve` as a user starts it, on the loopback.

Prompts and answers are token ids, so no tokenizer is needed.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from tests.servers import free_port
from tests.vllm_serve.logged_process import (
    ANSWER_TIMEOUT_S,
    POLL_S,
    LoggedProcess,
    opened,
    own_environment,
)

ROOT = str(Path(__file__).parents[2])  # from where a vLLM imports modules of these tests
ASYNCHRONOUS = "tests.vllm_serve.asynchronous:force"
BLOCK_TOKENS = 32
ANSWER_TOKENS = 16
STEP_TOKENS = 512
REQUESTS_MAX = 8  # that run at once
KV_SPACE_GIB = 1


@dataclass(frozen=True)
class Served:
    """What one `vllm serve` is started with. `transfer` is its `--kv-transfer-config`, as JSON;
    `asynchronous` turns on the scheduling that vLLM turns off on a CPU.
    """

    model: Path
    transfer: str = ""
    step_tokens: int = STEP_TOKENS
    tokens_max: int = 4096
    asynchronous: bool = False
    ranks: int = 1

    def command(self, port: int) -> list[str]:
        """The command line."""
        transfer = ("--kv-transfer-config", self.transfer) if self.transfer else ()
        return [
            *(str(Path(sys.executable).with_name("vllm")), "serve", str(self.model)),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
            *("--skip-tokenizer-init", "--enforce-eager", "--block-size", str(BLOCK_TOKENS)),
            *("--max-num-batched-tokens", str(self.step_tokens)),
            *("--max-model-len", str(self.tokens_max), "--max-num-seqs", str(REQUESTS_MAX)),
            *("--tensor-parallel-size", str(self.ranks)),
            *("--prefix-caching-hash-algo", "sha256_cbor"),
            *transfer,
        ]


class ServedVllm:
    """A running server. Asking raises where it does not answer in time."""

    def __init__(self, served: Served, folder: Path) -> None:
        """Start it; `wait_ready` returns when it serves. `folder` is for its files and its log."""
        folder.mkdir()
        self.served = served
        self._port = port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        modules = (ROOT, *self._plugin(folder))
        self._process = LoggedProcess(
            served.command(port), _environment(folder, modules, served.ranks), folder
        )

    def _plugin(self, folder: Path) -> tuple[str, ...]:
        """Where vLLM finds a plug-in of these tests, named to it as an installed package names its
        own.
        """
        if not self.served.asynchronous:
            return ()
        metadata = folder / "plugin" / "asynchronous-1.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: asynchronous\nVersion: 1\n"
        )
        (metadata / "entry_points.txt").write_text(
            f"[vllm.general_plugins]\nasynchronous = {ASYNCHRONOUS}\n"
        )
        return (str(metadata.parent),)

    @property
    def running(self) -> bool:
        """Whether the server's own process has not ended."""
        return self._process.running

    @property
    def log(self) -> str:
        """All that it printed."""
        return self._process.log

    def wait_ready(self) -> None:
        """Return when it serves; fails with the log's end where it does not."""
        self._process.wait_ready(f"{self._url}/health")

    def stop(self) -> None:
        """End it."""
        self._process.stop()

    # --- what tests ask ---

    def answer(self, prompt: Sequence[int]) -> list[int]:
        """The tokens that the model answers with, the likeliest each time."""
        reply = json.loads(self._ask("/v1/completions", self._document(prompt)))
        answer: list[int] = reply["choices"][0]["token_ids"]
        return answer

    @contextmanager
    def asked(self, prompt: Sequence[int]) -> Iterator[None]:
        """Asked by a client that is gone at the end of the block, whether it has its answer."""
        with closing(HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_TIMEOUT_S)) as client:
            body = json.dumps(self._document(prompt))
            client.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            yield

    def _document(self, prompt: Sequence[int]) -> dict[str, Any]:
        return {
            "model": str(self.served.model),
            "prompt": list(prompt),
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }

    def answers(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """The answers to prompts that are asked all at once."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(self.answer, prompts))

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, so that what it knows must come from elsewhere."""
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        while not json.loads(self._ask("/reset_prefix_cache", {}))["success"]:
            assert time.monotonic() < deadline_s, "vLLM keeps blocks, though nothing is asked of it"
            time.sleep(POLL_S)

    @property
    def loaded_tokens(self) -> int:
        """Tokens that vLLM took from its connector so far, by its own count."""
        return self._count("vllm:external_prefix_cache_hits_total")

    @property
    def parked_hits(self) -> int:
        """Requests that were parked until their KV was loaded, by the connector's count."""
        return self._count("vllm:objectcache_parked_hits_total")

    def _count(self, name: str) -> int:
        found = re.findall(
            rf"^{name}(?:{{.*}})? (\S+)$", opened(f"{self._url}/metrics"), re.MULTILINE
        )
        return sum(int(float(count)) for count in found)

    def _ask(self, path: str, document: dict[str, Any]) -> str:
        headers = {"content-type": "application/json"}
        body = json.dumps(document).encode()
        return opened(urllib.request.Request(f"{self._url}{path}", body, headers))

    def __repr__(self) -> str:
        return f"<ServedVllm {self.served.model.name} at {self._url}, log {self._process.log_file}>"


class Engines:
    """The `vllm serve` that tests share: one at a time, because each start takes many seconds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self.current: ServedVllm | None = None

    def running(self, served: Served) -> ServedVllm:
        """The server that was started so; another one is ended first."""
        if self.current is None or self.current.served != served or not self.current.running:
            return self.fresh(served)
        return self.current

    def fresh(self, served: Served) -> ServedVllm:
        """A server that was just started, as after a restart."""
        self.stop()
        self._count += 1
        self.current = ServedVllm(served, self._folder / f"vllm-{self._count}")
        self.current.wait_ready()
        return self.current

    def stop(self) -> None:
        """End the one that runs."""
        if self.current is not None:
            self.current.stop()


def _environment(folder: Path, modules: Sequence[str], ranks: int) -> dict[str, str]:
    """A home of this server's own; nothing is asked of the hub. What vLLM finds out of a kind of
    model is kept for those after it: each would start one more process that imports all of vLLM.

    The model's threads are bound to the processors that this process may use: vLLM's own choice
    leaves some of them out. Several ranks share one: they wait for each other by
    yielding it in a loop, and with all of them nobody else, the store among them, would get one.
    The development mode is what offers to empty the prefix cache.
    """
    processors = [str(number) for number in sorted(os.sched_getaffinity(0))]
    of_each_rank = [",".join(processors)] if ranks == 1 else processors[:1] * ranks
    return own_environment(folder, modules) | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(folder.parent / "cache"),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_SPACE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(of_each_rank),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
    }
