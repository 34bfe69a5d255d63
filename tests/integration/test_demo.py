"""The demo with a real server, in a short form, and how it ends when something is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from xml.etree import ElementTree

import pytest

from objectcache_laboratory.demo import DemoOptions, run_demo, server_process
from objectcache_laboratory.demo.paced_link import paced_link
from objectcache_laboratory.demo.server_process import await_ready, started
from objectcache_laboratory.reference_engine.config import ModelConfig
from objectcache_schemas.errors import Unavailable

# A run starts six interpreters, one after another: a minute and more on a busy machine.
TIMEOUT_S = 250.0
pytestmark = pytest.mark.timeout(300)
# Several BLAS threads wait for each other, which takes long when other processes have the cores.
ENVIRONMENT = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
# Its products are too small to be shared among BLAS threads.
TINY = ModelConfig(num_layers=2, hidden=32, n_heads=4, n_kv_heads=2, head_dim=8, mlp_hidden=48)
TEXT = b"A prefix is prefilled once, stored, and reused by every turn that begins with it. " * 8


@pytest.fixture
def document(tmp_path: Path) -> Path:
    file = tmp_path / "document.txt"
    file.write_bytes(TEXT)
    return file


def demo_command(document: Path, tmp_path: Path, *more: str) -> list[str]:
    flags = ["--document", str(document), "--document-tokens-max", "512", "--answer-tokens", "4"]
    outputs = ["--output-dir", str(tmp_path / "output"), "--json", str(tmp_path / "result.json")]
    return [sys.executable, "-m", "objectcache_laboratory.demo", *flags, *outputs, *more]


def listens(url: str) -> bool:
    parts = urlsplit(url)
    with socket.socket() as probe:
        return probe.connect_ex((parts.hostname, parts.port)) == 0


def server_url(output: str) -> str:
    return next(word.rstrip(",") for word in output.split() if word.startswith("http://"))


def test_the_demo_reuses_a_stored_prefix_and_its_answers_agree(
    document: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = DemoOptions(
        document=document,
        document_tokens_max=64,
        turns=3,
        answer_tokens=4,
        link_gbit_per_s=5,
        model=TINY,
        output_dir=tmp_path / "output",
        json_file=tmp_path / "result.json",
    )
    code = run_demo(options)
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "The answers agree" in printed.out
    assert not listens(server_url(printed.out))
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["agree"] is True
    assert [turn["hit_tokens"] > 0 for turn in result["turns"]] == [False, True, True]
    for turn in result["turns"][1:]:
        ways = [(reuse["path"], reuse["delivery"]) for reuse in turn["reuses"]]
        assert ways == [
            ("same host", "chunkwise"),
            ("same host", "layerwise"),
            ("5 Gbit/s", "chunkwise"),
            ("5 Gbit/s", "layerwise"),
        ]
        assert all(reuse["bytes_identical"] for reuse in turn["reuses"])
        assert all(reuse["logits_identical"] for reuse in turn["reuses"])
        assert [reuse["transport"] for reuse in turn["reuses"][2:]] == ["body", "body"]
    assert [turn["slow_reuses"] != [] for turn in result["turns"]] == [False, False, True]
    plain, encoded = result["turns"][-1]["slow_reuses"]
    assert (plain["path"], encoded["path"]) == ("plain", "encoded")
    assert plain["wire_bytes"] == result["turns"][-1]["fetched_bytes"]
    assert encoded["wire_bytes"] < 0.9 * plain["wire_bytes"]
    assert plain["bytes_identical"]
    assert encoded["bytes_identical"]
    assert encoded["logits_identical"]
    assert "MiB on the wire" in printed.out
    svg = ElementTree.parse(tmp_path / "output" / "timeline.svg").getroot()
    assert svg.tag == "{http://www.w3.org/2000/svg}svg"


def test_the_server_ends_when_the_demo_is_terminated(document: Path, tmp_path: Path) -> None:
    with subprocess.Popen(
        demo_command(document, tmp_path), env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stdout is not None
        try:
            lines = iter(demo.stdout.readline, "")
            url = server_url(next(line for line in lines if "http://" in line))
            assert listens(url)
            demo.send_signal(signal.SIGTERM)
            assert demo.wait(TIMEOUT_S) == 128 + signal.SIGTERM
        finally:
            demo.kill()
    assert not listens(url)


def test_a_document_that_is_not_there_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing.txt"
    assert run_demo(DemoOptions(document=missing, output_dir=tmp_path)) == 2
    expected = f"objectcache demo: document {missing}: No such file or directory\n"
    assert capsys.readouterr().err == expected


def test_an_output_that_cannot_be_written_is_found_before_the_work(
    document: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo(DemoOptions(document=document, output_dir=document / "below")) == 2
    assert "Not a directory" in capsys.readouterr().err


def test_a_server_that_does_not_start_is_one_line_with_its_last_words(
    document: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refusing(data_dir: Path) -> list[str]:
        return [sys.executable, "-c", "import sys; sys.exit('the disk is on fire')"]

    monkeypatch.setattr(server_process, "serve_command", refusing)
    assert run_demo(DemoOptions(document=document, output_dir=tmp_path)) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "exit code 1: the disk is on fire" in error


def test_a_server_that_stays_silent_is_given_up_and_stopped(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with started(command, tmp_path / "log") as process:
        with pytest.raises(Unavailable, match=r"within 0\.2 s"):
            await_ready(process, tmp_path / "log", timeout_s=0.2)
        pid = process.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_ready_line_that_comes_in_pieces_is_read_whole(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "for piece in ('starting\\nready http://127.0', '.0.1:77', '1\\ncredentials x\\n'):\n"
        "    sys.stdout.write(piece); sys.stdout.flush()\n"
        "sys.stdin.read()\n"
    )
    with started([sys.executable, "-c", code], tmp_path / "log") as process:
        assert await_ready(process, tmp_path / "log", TIMEOUT_S) == "http://127.0.0.1:771"


@contextlib.contextmanager
def answering_server(answer: bytes) -> Iterator[str]:
    """Reads 4 bytes of each connection, answers, and closes it."""

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # closed
            with connection:
                assert connection.recv(4, socket.MSG_WAITALL) == b"ping"
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def ask(url: str) -> bytes:
    parts = urlsplit(url)
    with socket.create_connection((str(parts.hostname), parts.port or 0)) as connection:
        connection.sendall(b"ping")
        with connection.makefile("rb") as answer:
            return answer.read()


def test_a_paced_link_passes_every_byte_no_faster_than_its_rate() -> None:
    answer = random.Random(5).randbytes(16 << 20)
    with answering_server(answer) as server, paced_link(server, 100 * 10**6) as url:
        start_s = time.monotonic()
        assert ask(url) == answer
        duration_s = time.monotonic() - start_s
        assert ask(url) == answer
    assert duration_s > 0.7 * len(answer) / 10**8
    assert not listens(url)


def test_a_paced_link_to_nowhere_closes_its_connections() -> None:
    with answering_server(b"") as server:
        pass
    with paced_link(server, 10**9) as url:
        with contextlib.suppress(ConnectionError):
            assert ask(url) == b""
        with contextlib.suppress(ConnectionError):
            assert ask(url) == b""


def test_a_demo_without_a_link_measures_this_host_only(tmp_path: Path, document: Path) -> None:
    options = DemoOptions(
        document=document,
        document_tokens_max=256,
        turns=2,
        answer_tokens=3,
        link_gbit_per_s=0,
        model=TINY,
        output_dir=tmp_path,
        json_file=tmp_path / "result.json",
    )
    assert run_demo(options) == 0
    turn = json.loads((tmp_path / "result.json").read_text())["turns"][1]
    assert [reuse["path"] for reuse in turn["reuses"]] == ["same host", "same host"]
