"""The demo from its options to its exit code."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from objectcache import Client
from objectcache_laboratory.demo.conversation import DemoConversation, FetchPath
from objectcache_laboratory.demo.document import Document, load_document
from objectcache_laboratory.demo.options import QUESTIONS, DemoOptions, parse_options
from objectcache_laboratory.demo.paced_link import paced_link
from objectcache_laboratory.demo.report import (
    slow_table,
    timeline_text,
    turn_line,
    turns_table,
    verdict,
)
from objectcache_laboratory.demo.results import (
    ENCODED,
    PLAIN,
    SAME_HOST,
    DemoResult,
    TurnMeasurement,
    best_reuse,
)
from objectcache_laboratory.demo.server_process import (
    RunningServer,
    running_server,
    store_encoded,
)
from objectcache_laboratory.demo.timeline_svg import timeline_svg
from objectcache_laboratory.reference_engine.engine import ReferenceEngine
from objectcache_schemas.errors import InvalidRequest, ObjectCacheError

EXIT_FAILED = 1
EXIT_WRONG_USE = 2
BUCKET = "reference-model"


def main(arguments: Sequence[str] = ()) -> int:
    """Run the demo with these command-line arguments; returns the exit code.

    Takes over SIGTERM, so that the server it started ends with it.
    """
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        options = parse_options(arguments)
    except InvalidRequest as error:
        return _fail(error.message, EXIT_WRONG_USE)
    try:
        return run_demo(options)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def run_demo(options: DemoOptions) -> int:
    """Run the demo; 0 only if all answers agree, 1 if not or on a failure, 2 on wrong use.

    Failures are one line on standard error.
    """
    try:
        document = load_document(options.document, options.document_tokens_max)
        _check_outputs(options)
    except InvalidRequest as error:
        return _fail(error.message, EXIT_WRONG_USE)
    console = Console(highlight=False)
    try:
        result = _converse(options, document, console)
    except ObjectCacheError as error:
        return _fail(f"{error.message} (server log: {options.server_log_file})", EXIT_FAILED)
    return _show(result, options, console)


def _converse(options: DemoOptions, document: Document, console: Console) -> DemoResult:
    console.print(f"{len(document.text):,} bytes of {document.name}, a token each")
    with console.status("starting the server") as status, contextlib.ExitStack() as stack:
        engine = ReferenceEngine(options.model)
        server = stack.enter_context(
            running_server(options.server_log_file, options.start_timeout_s)
        )
        console.print(f"server at {server.endpoint}, stopped and removed at the end")
        paths = _paths(options, server, stack)
        slow_paths = _slow_paths(options, server, stack)
        turns: list[TurnMeasurement] = []
        conversation = DemoConversation(
            engine,
            paths,
            options.chunk_tokens,
            options.answer_tokens,
            lambda step: status.update(f"turn {len(turns) + 1}: {step}"),
        )
        for text in _said(document, options.turns):
            is_last = len(turns) + 1 == options.turns
            turns.append(conversation.turn(text, slow_paths if is_last else ()))
            console.print(turn_line(turns[-1]), soft_wrap=True)
        status.update("stopping the server")
    return DemoResult(
        document.name,
        len(document.text),
        options.model,
        options.chunk_tokens,
        tuple(path.name for path in paths),
        tuple(turns),
    )


def _said(document: Document, turns: int) -> Iterator[bytes]:
    """What the user says in each turn; the first brings the document."""
    for index, question in enumerate(QUESTIONS[:turns]):
        yield (b"" if index else document.text) + f"\n\n{question}\n".encode()


def _paths(
    options: DemoOptions, server: RunningServer, stack: contextlib.ExitStack
) -> list[FetchPath]:
    """This host's memory first, then the link, if there is to be one."""
    layout = options.model.kv_layout(options.chunk_tokens)
    client = stack.enter_context(_client(server, server.endpoint, "auto"))
    paths = [FetchPath(SAME_HOST, client.kv_bucket(BUCKET, layout, create=True))]
    if options.link_gbit_per_s:
        rate_bytes_per_s = options.link_gbit_per_s * 10**9 // 8
        url = stack.enter_context(paced_link(server.endpoint, rate_bytes_per_s))
        linked = stack.enter_context(_client(server, url, "body"))
        name = f"{options.link_gbit_per_s} Gbit/s"
        paths.append(FetchPath(name, linked.kv_bucket(BUCKET, layout)))
    return paths


def _slow_paths(
    options: DemoOptions, server: RunningServer, stack: contextlib.ExitStack
) -> list[FetchPath]:
    """The same link to a bucket of plain chunks and to one of encoded chunks, if it is to be."""
    if not options.slow_link_gbit_per_s:
        return []
    layout = options.model.kv_layout(options.chunk_tokens)
    rate_bytes_per_s = options.slow_link_gbit_per_s * 10**9 // 8
    url = stack.enter_context(paced_link(server.endpoint, rate_bytes_per_s))
    paths = []
    for name, encodings in ((PLAIN, []), (ENCODED, ["planes-zstd"])):
        client = stack.enter_context(_client(server, url, "body", encodings))
        bucket = client.kv_bucket(f"{BUCKET}-{name}", layout, create=True)
        if encodings:
            store_encoded(server, bucket.name)
        paths.append(FetchPath(name, bucket))
    return paths


def _client(
    server: RunningServer, url: str, transport: str, encodings: Sequence[str] = ()
) -> Client:
    return Client(
        url,
        access_key=server.access_key,
        secret_key=server.secret_key,
        transport=transport,
        encodings=encodings,
    )


def _show(result: DemoResult, options: DemoOptions, console: Console) -> int:
    console.print()
    console.print(turns_table(result))
    if result.turns[-1].slow_reuses:
        console.print()
        console.print(slow_table(result.turns[-1], options.slow_link_gbit_per_s))
    drawn = best_reuse(result.turns)
    if drawn is not None:
        path = result.paths[-1]
        console.print()
        console.print(timeline_text(drawn, path, console.width), soft_wrap=True)
        options.svg_file.write_text(timeline_svg(drawn, path), "utf-8")
        console.print(f"The same, and chunkwise for comparison: {options.svg_file}", soft_wrap=True)
    if options.json_file is not None:
        options.json_file.write_text(result.to_json(), "utf-8")
    console.print()
    console.print(verdict(result), soft_wrap=True)
    return EXIT_FAILED if result.failures() else 0


def _check_outputs(options: DemoOptions) -> None:
    """Find out before the work whether its outcome can be written."""
    try:
        options.output_dir.mkdir(parents=True, exist_ok=True)
        if options.json_file is not None:
            _check_writable(options.json_file)
    except OSError as error:
        raise InvalidRequest(f"output {error.filename}: {error.strerror}") from error


def _check_writable(file: Path) -> None:
    with file.open("a"):
        pass


def _fail(message: str, exit_code: int) -> int:
    print(f"objectcache demo: {message}", file=sys.stderr)
    return exit_code


def _exit_on_signal(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)
