"""What command line clients share: files in, files out, and an exit status."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.clients.driver import Endpoint, S3Driver

TIMEOUT_S = 60.0


class CommandFailed(Exception):
    """A client ended with another status than 0; the text is what it said."""


class CommandDriver(S3Driver):
    """Runs one program; a step is one command, as a user would type it."""

    def __init__(self, endpoint: Endpoint, workspace: Path) -> None:
        super().__init__(endpoint, workspace)
        self._file = workspace / "file"

    def run(
        self,
        *command: str,
        send: bytes | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> bytes:
        """Standard output; raises `CommandFailed`."""
        done = subprocess.run(
            command,
            input=send,
            capture_output=True,
            timeout=TIMEOUT_S,
            env=environment,
            check=False,
        )
        if done.returncode:
            raise CommandFailed((done.stderr + done.stdout)[-2000:].decode(errors="replace"))
        return done.stdout

    def file_of(self, data: bytes) -> str:
        """A local file that holds `data`."""
        self._file.write_bytes(data)
        return str(self._file)

    def fresh_file(self) -> Path:
        """A path at which there is no file."""
        self._file.unlink(missing_ok=True)
        return self._file
