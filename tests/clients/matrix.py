"""Which clients there are, over which wires, and why one is missing on this machine."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.clients.remote import ROOT

# `make clients` sets it; without it, only what is quick is run.
EVERYTHING = os.environ.get("CLIENT_MATRIX") == "full"
_OWN_PYTHON = Path(sys.executable)
_CLIENTS = ROOT / ".venv-clients"
_CLIENTS_PYTHON = _CLIENTS / "python/bin/python"
_INSTALL = "`make clients` installs it"


@dataclass(frozen=True, slots=True)
class Wire:
    """HTTP or HTTPS, path style or virtual-host style."""

    secure: bool
    virtual_host: bool

    def __str__(self) -> str:
        scheme = "https" if self.secure else "http"
        return f"{scheme}-{'virtual-host' if self.virtual_host else 'path'}"


HTTP, HTTPS = Wire(secure=False, virtual_host=False), Wire(secure=True, virtual_host=False)
HTTP_VIRTUAL = Wire(secure=False, virtual_host=True)
HTTPS_VIRTUAL = Wire(secure=True, virtual_host=True)
WIRES = (HTTP, HTTPS, HTTP_VIRTUAL, HTTPS_VIRTUAL)


@dataclass(frozen=True, slots=True)
class Client:
    """A driver, and what it needs to be there."""

    name: str
    driver: str  # module and class below tests.clients.drivers
    python: Path = _OWN_PYTHON
    needs: Path | None = None  # a program, or a file of an installed package
    remedy: str = _INSTALL
    quick_wires: tuple[Wire, ...] = (HTTP, HTTPS_VIRTUAL)  # what `make test` runs
    all_wires: tuple[Wire, ...] = WIRES

    @property
    def missing(self) -> str | None:
        """Why it cannot be run here, or None."""
        if not self.python.exists():
            return f"{self.name} is not installed: {self.remedy}"
        if self.needs is not None and not self.needs.exists():
            return f"{self.name} is not installed: {self.remedy}"
        return None

    @property
    def wires(self) -> tuple[Wire, ...]:
        """What is run now."""
        return self.all_wires if EVERYTHING else self.quick_wires


def _package(name: str) -> Path:
    return (
        _CLIENTS
        / f"python/lib/python{sys.version_info[0]}.{sys.version_info[1]}"
        / (f"site-packages/{name}")
    )


def _program(name: str) -> Path:
    return Path(shutil.which(name, path="/usr/bin:/bin") or f"/usr/bin/{name}")


# A command of the aws line takes most of a second to start, and s3fs speaks with botocore as boto3
# does, so they are left to `make clients`; tests/integration/test_aws_cli.py has aws in every run.
CLIENTS = (
    Client("boto3", "boto:Boto3", quick_wires=(HTTP, HTTPS)),  # needs no mount for HTTPS
    Client("awscrt", "crt:AwsCrt"),
    Client("s3fs", "s3fs_files:S3fs", _CLIENTS_PYTHON, _package("s3fs"), quick_wires=()),
    Client("minio-py", "minio_py:MinioPy", _CLIENTS_PYTHON, _package("minio")),
    Client("obstore", "obstore_rust:Obstore", _CLIENTS_PYTHON, _package("obstore")),
    Client(
        "s5cmd",
        "s5cmd_tool:S5cmd",
        needs=_CLIENTS / "python/bin/s5cmd",
        quick_wires=(HTTP,),
        all_wires=(HTTP, HTTPS),  # virtual hosts only with Amazon's and Google's names
    ),
    Client(
        "rclone-debian",
        "rclone_tool:Rclone",
        needs=_program("rclone"),
        remedy="apt-get install rclone",
        quick_wires=(HTTPS,),
    ),
    Client(
        "rclone-current",
        "rclone_tool:CurrentRclone",
        needs=_CLIENTS / "python/bin/rclone",
        quick_wires=(),
    ),
    Client(
        "s3cmd",
        "s3cmd_tool:S3cmd",
        needs=_program("s3cmd"),
        remedy="apt-get install s3cmd",
        quick_wires=(HTTP,),
    ),
    Client(
        "aws-cli-debian",
        "aws_cli:AwsCli",
        needs=Path("/usr/bin/aws"),
        remedy="apt-get install awscli",
        quick_wires=(),
    ),
    Client(
        "aws-cli-current",
        "aws_cli:CurrentAwsCli",
        needs=_CLIENTS / "aws/bin/aws",
        quick_wires=(),
    ),
    Client(
        "curl-presigned",
        "curl_presigned:CurlPresigned",
        needs=_program("curl"),
        remedy="apt-get install curl",
    ),
)
