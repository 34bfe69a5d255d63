"""What stands for a service whose answers make no sense, which nothing of ours gives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

DEEP = b'{"z":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
NO_TEXT = b'{"name":"\xff"}'


@contextmanager
def false_service(answer: Callable[[str, str], bytes]) -> Iterator[str]:
    """The URL of one that gives this answer to a method and a path."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            body = answer(self.command, self.path)
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_DELETE = _answer

        def log_message(self, *_: object) -> None:
            """Tests say what is wrong."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            serving.join()
