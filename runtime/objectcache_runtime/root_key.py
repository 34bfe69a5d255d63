"""Where the root key pair is: in two variables of the environment, or in a file of DATA_DIR."""

from __future__ import annotations

ROOT_ACCESS_KEY_VARIABLE = "OBJECTCACHE_ROOT_ACCESS_KEY"
ROOT_SECRET_KEY_VARIABLE = "OBJECTCACHE_ROOT_SECRET_KEY"  # noqa: S105 - a variable's name
ROOT_CREDENTIALS_FILE = "root-credentials"  # written by the gateway, readable by its user only
ROOT_CREDENTIALS_BYTES_MAX = 4096  # two short lines; more is another file
