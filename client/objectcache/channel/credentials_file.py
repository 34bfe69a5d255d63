"""An access key out of a file that AWS' own tools write and read too."""

from __future__ import annotations

import configparser
from pathlib import Path

from objectcache_schemas.errors import InvalidRequest

PROFILE = "default"


def check_not_for_all(what: str, file: Path) -> None:
    """Raise `InvalidRequest` where everybody on this host may read a secret. A group may: systemd
    hands credentials to a service by access lists, which show as the group's bits.
    """
    try:
        mode = file.stat().st_mode
    except OSError as error:
        raise InvalidRequest(f"{what}: {file} cannot be read: {error}") from error
    if mode & 0o007:
        raise InvalidRequest(f"{what}: {file} can be read by everybody; run: chmod 600 {file}")


def read_credentials(file: Path) -> tuple[str, str]:
    """Access key and secret of the default profile of an AWS shared-credentials file.

    Raises `InvalidRequest` that names the file and what is wrong with it, never what it holds.
    """
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(file.read_text("utf-8"), str(file))
        profile = parser[PROFILE]
        return profile["aws_access_key_id"], profile["aws_secret_access_key"]
    except OSError as error:
        raise InvalidRequest(f"credentials file {file}: {error.strerror}") from error
    except KeyError as error:
        raise InvalidRequest(f"credentials file {file}: there is no {error.args[0]}") from None
    except (configparser.Error, UnicodeDecodeError):
        # The parser's own message quotes the line, which may be the secret.
        raise InvalidRequest(
            f"credentials file {file}: not in the AWS shared-credentials format"
        ) from None
