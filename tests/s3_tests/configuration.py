"""The suite's configuration file: where the server is, and the key pairs of six users."""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from tests.s3_tests.accounts import AddedUser

REGION = "objectcache-1"  # not us-east-1, which S3 answers as no location at all
LIFECYCLE_DAY_S = 10  # so long is a day, for the suite's tests of expiry
# Section of the configuration to the user that it names. The suite reads all of them.
USERS = {
    "s3 main": "main",
    "s3 alt": "alt",
    "s3 tenant": "tenant",
    "iam": "iam",
    "iam root": "iam-root",
    "iam alt root": "iam-alt-root",
}


def write_configuration(file: Path, endpoint: str, users: Mapping[str, AddedUser]) -> None:
    """Write it; `users` has the keys of `USERS`."""
    url = urlsplit(endpoint)
    parser = configparser.RawConfigParser()
    parser["DEFAULT"] = {
        "host": url.hostname or "",
        "port": str(url.port),
        "is_secure": str(url.scheme == "https"),
        "ssl_verify": "False",  # the suite cannot be told of an authority of one's own
    }
    parser["fixtures"] = {
        "bucket prefix": "s3-tests-{random}-",
        "iam name prefix": "s3-tests-",
        "iam path prefix": "/s3-tests/",
    }
    for section, user in users.items():
        parser[section] = {
            "access_key": user.access_key,
            "secret_key": user.secret_key,
            "user_id": user.name,
            "display_name": user.name,
            "email": f"{user.name}@example.com",
        }
    parser["s3 main"].update({"api_name": REGION, "lc_debug_interval": str(LIFECYCLE_DAY_S)})
    parser["s3 tenant"]["tenant"] = ""
    with file.open("w", encoding="utf-8") as stream:
        parser.write(stream)
    file.chmod(0o600)
