"""The aws command line, unmodified: Debian's where it is installed, else whichever is there."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.servers import RunningServer

AWS = "/usr/bin/aws" if os.path.exists("/usr/bin/aws") else shutil.which("aws")
COMMAND_TIMEOUT_S = 300.0
pytestmark = [
    pytest.mark.skipif(AWS is None, reason="the aws command line is not installed"),
    # Every command loads all of botocore first, as slowly as a busy machine is.
    pytest.mark.timeout(1200),
]


class AwsCli:
    """Runs `aws` against a server, with an environment of its own."""

    def __init__(self, server: RunningServer, home: Path) -> None:
        self._endpoint = server.endpoint
        self._environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "AWS_ACCESS_KEY_ID": server.credentials.access_key,
            "AWS_SECRET_ACCESS_KEY": server.credentials.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
            "AWS_PAGER": "",
        }

    def run(self, *arguments: str, status: int = 0) -> str:
        """Standard output of one command that must end with `status`."""
        assert AWS is not None
        done = subprocess.run(
            [AWS, "--endpoint-url", self._endpoint, *arguments],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == status, (arguments, done.stdout, done.stderr)
        return done.stdout


@pytest.fixture
def aws(server: RunningServer, tmp_path: Path) -> AwsCli:
    return AwsCli(server, tmp_path)


@pytest.fixture
def bucket_url(bucket: str) -> str:
    return f"s3://{bucket}"


def test_files_of_every_size_come_back_the_same(
    aws: AwsCli, bucket_url: str, tmp_path: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for size_bytes in (0, 1, 100_000, 20 << 20):  # the last is a multipart upload
        (source / f"{size_bytes} bytes+\u00e9.bin").write_bytes(os.urandom(size_bytes))
    aws.run("s3", "cp", "--quiet", "--recursive", str(source), f"{bucket_url}/dir")
    aws.run("s3", "cp", "--quiet", "--recursive", f"{bucket_url}/dir", str(target))
    sent, came = (
        {file.name: file.read_bytes() for file in folder.iterdir()} for folder in (source, target)
    )
    assert came == sent
    listed = aws.run("s3", "ls", "--recursive", bucket_url)
    sizes = [int(line.split()[2]) for line in listed.splitlines()]
    assert sorted(sizes) == [0, 1, 100_000, 20 << 20]


def test_sync_move_and_remove_work(aws: AwsCli, tmp_path: Path) -> None:
    bucket_url = f"s3://aws-{secrets.token_hex(4)}"
    aws.run("s3", "mb", bucket_url)
    tree = tmp_path / "tree"
    for name in ("a", "b/c", "b/d"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(name)
    aws.run("s3", "sync", "--quiet", str(tree), bucket_url)
    aws.run("s3", "mv", "--quiet", f"{bucket_url}/b/c", f"{bucket_url}/e")
    keys = aws.run(
        "s3api",
        "list-objects-v2",
        "--bucket",
        bucket_url[5:],
        "--output",
        "text",
        "--query",
        "Contents[].Key",
    ).split()
    assert keys == ["a", "b/d", "e"]
    aws.run("s3", "rb", bucket_url, status=1)  # not empty
    aws.run("s3", "rm", "--quiet", "--recursive", bucket_url)
    aws.run("s3", "rb", bucket_url)


def test_ranges_conditions_and_misses_are_reported(
    aws: AwsCli, bucket_url: str, tmp_path: Path
) -> None:
    source, part = tmp_path / "source", tmp_path / "part"
    source.write_bytes(b"0123456789")
    aws.run("s3", "cp", "--quiet", str(source), f"{bucket_url}/object")
    name = ("--bucket", bucket_url[5:], "--key", "object")
    aws.run("s3api", "get-object", *name, "--range", "bytes=3-5", str(part))
    assert part.read_bytes() == b"345"
    aws.run("s3api", "get-object", *name, "--if-match", '"other"', str(part), status=254)
    aws.run("s3api", "head-object", "--bucket", bucket_url[5:], "--key", "none", status=254)
