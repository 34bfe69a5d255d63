"""`python -m benchmarks.vllm_ttft --vllm VENV/bin/vllm`: times to the first token of a whole vLLM.

vLLM's CPU build serves a small model with random weights. Each load mode has an engine of its own.
Prompts are asked three times: computed, then hit by an engine whose own prefix cache was emptied,
for the first time and again; then several different ones at once. Then the server's deliveries are
slowed down, and prompts hit one after the other while another request is answered, whose longest
wait for a token is shown beside their times. Answers are compared: a hit must answer as computing
did.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.basis.missing_packages import or_say_what_to_install
from objectcache_schemas.operators.schedule import ScheduleChanges, ScheduleState, SetSchedule
from tests.servers import RunningServer, running_server
from tests.storage_client import StorageClient

with or_say_what_to_install("make .venv-vllm/.installed, and run this with .venv-vllm/bin/python"):
    from tests.vllm_serve.small_model import VOCABULARY, WIDTH, Llama, write_model

MODEL = Llama(layers=8, hidden=512, heads=8, inner=1408, tokens_max=12_288)
KV_BYTES_A_TOKEN = MODEL.layers * 2 * MODEL.heads * WIDTH * 4
READY_S, ANSWER_S = 300.0, 120.0
DIFFERENT = 4  # prompts of 3,000 tokens
SLOW_GBPS = 0.4  # 50 MB/s: about two seconds for one of them
BEFORE_TOKENS = 10  # of the other request, before a prompt is asked beside it
OTHERS_TOKENS = 4000  # more than it will answer


class Engine:
    """A `vllm serve` on the loopback, in a process group of its own."""

    def __init__(self, program: Path, model: Path, folder: Path, transfer: dict[str, Any]) -> None:
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            self._url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self._model = str(model)
        self.log = folder / "vllm.log"
        processors = ",".join(str(number) for number in sorted(os.sched_getaffinity(0)))
        environment = os.environ | {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": processors,
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        command = [
            *(str(program), "serve", str(model), "--host", "127.0.0.1"),
            *("--port", self._url.rsplit(":", 1)[1], "--dtype", "float32", "--enforce-eager"),
            *("--skip-tokenizer-init", "--block-size", "32"),
            *("--max-model-len", str(MODEL.tokens_max)),
            *("--max-num-batched-tokens", "2048", "--prefix-caching-hash-algo", "sha256_cbor"),
            *("--kv-transfer-config", json.dumps(transfer)),
        ]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def wait_ready(self) -> None:
        """Return when it serves."""
        deadline_s = time.monotonic() + READY_S
        while True:
            with contextlib.suppress(OSError):
                self._ask("/health")
                return
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(self.log.read_text(errors="replace")[-4000:])
            time.sleep(0.2)

    def answer(self, prompt: Sequence[int]) -> tuple[float, int]:
        """Seconds to the first token, which is also the last, and the token."""
        asked = {"model": self._model, "prompt": list(prompt), "max_tokens": 1, "temperature": 0}
        begun_s = time.monotonic()
        reply = self._ask("/v1/completions", {**asked, "return_token_ids": True})
        token: int = reply["choices"][0]["token_ids"][0]
        return time.monotonic() - begun_s, token

    @contextlib.contextmanager
    def answering(self, prompt: Sequence[int]) -> Generator[list[float]]:
        """Another request is answered for the length of the block, token by token: when each one
        came (by time.monotonic).
        """
        asked = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": OTHERS_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        came_s: list[float] = []
        with contextlib.closing(self._open("/v1/completions", asked)) as reply:

            def read() -> None:
                with contextlib.suppress(OSError, ValueError, AttributeError):  # when it is closed
                    came_s.extend(time.monotonic() for line in reply if line.startswith(b"data"))

            reading = threading.Thread(target=read)
            reading.start()
            deadline_s = time.monotonic() + ANSWER_S
            try:
                while len(came_s) < BEFORE_TOKENS:
                    if not reading.is_alive() or time.monotonic() > deadline_s:
                        raise SystemExit("the other request is not answered")
                    time.sleep(0.01)
                yield came_s
            finally:
                reply.fp.raw._sock.shutdown(socket.SHUT_RDWR)
                reading.join()

    def forget(self) -> None:
        """Empty its own prefix cache."""
        while not self._ask("/reset_prefix_cache", {})["success"]:
            time.sleep(0.05)

    def _ask(self, path: str, document: dict[str, Any] | None = None) -> Any:
        with self._open(path, document) as reply:
            return json.loads(reply.read() or b"null")

    def _open(self, path: str, document: dict[str, Any] | None = None) -> Any:
        body = None if document is None else json.dumps(document).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self._url + path, body, headers)
        return urllib.request.urlopen(request, timeout=ANSWER_S)

    def stop(self) -> None:
        """End the group."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def prompt(seed: int, count: int) -> list[int]:
    """Tokens that no other seed begins with."""
    return [int(token) for token in np.random.default_rng(seed).integers(2, VOCABULARY, count)]


def transfer_config(server: RunningServer, mode: str) -> dict[str, Any]:
    """The connector as docs/vllm.md has it."""
    return {
        "kv_connector": "ObjectCacheConnector",
        "kv_connector_module_path": "objectcache.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "endpoint": server.endpoint,
            "bucket": f"ttft-{mode.replace('_', '-')}",
            "credentials_file": str(server.credentials_file),
            "weights_revision": "random",
            "load_mode": mode,
        },
    }


def measure(program: Path, model: Path, folder: Path, mode: str, sizes: Sequence[int]) -> list[Any]:
    """Rows of one load mode."""
    rows: list[Any] = []
    with running_server(folder / "data") as server:
        for restarted in (False, True):
            engine = Engine(program, model, folder, transfer_config(server, mode))
            try:
                engine.wait_ready()
                engine.answer(prompt(1, 64))
                rows += (_hits if restarted else _computed)(engine, mode, sizes)
                rows += _beside_another(engine, server, mode) if restarted else ()
                time.sleep(2.0)  # the last puts
            finally:
                engine.stop()
    return rows


_RIGHT: dict[tuple[str, int], int] = {}


def _computed(engine: Engine, mode: str, sizes: Sequence[int]) -> list[Any]:
    rows = []
    for size in sizes:
        took_s, _RIGHT[mode, size] = engine.answer(prompt(size, size))
        rows.append((mode, size, "computed", [took_s]))
    for number in range(DIFFERENT):
        _, _RIGHT[mode, number] = engine.answer(prompt(100 + number, 3000))
    return rows


def _hits(engine: Engine, mode: str, sizes: Sequence[int]) -> list[Any]:
    rows = []
    for size in sizes:
        first, *again = [_hit(engine, mode, size, prompt(size, size)) for _ in range(6)]
        rows += [(mode, size, "first hit", [first]), (mode, size, "later hits", again)]
    for _ in range(2):
        engine.forget()
        with ThreadPoolExecutor(DIFFERENT) as threads:
            asked = [prompt(100 + number, 3000) for number in range(DIFFERENT)]
            answers = list(threads.map(engine.answer, asked))
        right = [_RIGHT[mode, number] for number in range(DIFFERENT)]
        assert [token for _, token in answers] == right
    return [*rows, (mode, 3000, "4 hits at once", [took_s for took_s, _ in answers])]


def _beside_another(engine: Engine, server: RunningServer, mode: str) -> list[Any]:
    """Slow hits while another request is answered. The first one teaches what loads take."""
    took_s, waits_s = list[float](), list[float]()
    with StorageClient(server.run_dir / "storage.sock") as connection:
        connection.ask(SetSchedule(changes=ScheduleChanges(cap_gbps=SLOW_GBPS)), ScheduleState)
    for number in range(DIFFERENT):
        engine.forget()
        with engine.answering(prompt(7, 64)) as came_s:
            begin = len(came_s) - 1
            answered_s, token = engine.answer(prompt(100 + number, 3000))
            others_s = [*came_s[begin:], time.monotonic()]
        assert token == _RIGHT[mode, number], "a hit answers otherwise than computing did"
        took_s.append(answered_s)
        waits_s.append(max(after - before for before, after in pairwise(others_s)))
    return [
        (mode, 3000, "slow hits beside another", took_s[1:]),
        (mode, 3000, "the other's longest wait", waits_s[1:]),
    ]


def _hit(engine: Engine, mode: str, name: int, asked: Sequence[int]) -> float:
    engine.forget()
    took_s, token = engine.answer(asked)
    assert token == _RIGHT[mode, name], "a hit answers otherwise than computing did"
    return took_s


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(prog="python -m benchmarks.vllm_ttft", description=__doc__)
    arguments.add_argument("--vllm", type=Path, required=True, help="the vllm command")
    arguments.add_argument("--modes", default="layerwise,before_schedule,per_request")
    arguments.add_argument("--tokens", default="1000,3000,8000")
    chosen = arguments.parse_args()
    sizes = [int(size) for size in chosen.tokens.split(",")]
    table = Table("load mode", "prompt tokens", "KV MiB", "what", "ms, median", "most")
    for mode in chosen.modes.split(","):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            model = write_model(folder / "model", MODEL)
            for row in measure(chosen.vllm, model, folder, mode, sizes):
                _, size, what, times_s = row
                shown = [f"{1e3 * of(times_s):.0f}" for of in (statistics.median, max)]
                table.add_row(mode, str(size), f"{size * KV_BYTES_A_TOKEN >> 20}", what, *shown)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
