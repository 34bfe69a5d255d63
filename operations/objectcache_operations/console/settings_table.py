"""docs/settings.md, written from the settings' own declarations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, get_args, get_origin

import msgspec

from objectcache_runtime.root_key import (
    ROOT_ACCESS_KEY_VARIABLE,
    ROOT_CREDENTIALS_FILE,
    ROOT_SECRET_KEY_VARIABLE,
)
from objectcache_runtime.setting_values import in_binary_unit
from objectcache_runtime.settings import ENVIRONMENT_PREFIX, SECTIONS, setting_fields

INTRODUCTION = """\
# Settings

One table for `objectcache serve`, `gateway`, `storage`, `relay`, `fetcher` and `dispatch`. Each
setting can be given in a TOML file (`--config FILE`, or the variable `OBJECTCACHE_CONFIG`), in an
environment variable, or as a flag (`--set section.key=value`). Later sources win, in this order:
default, file, environment, flag. A key that is not in the table is an error. Lists are separated by
commas in variables and flags, and bytes may be given with a unit there, as in 64MiB.

`limits` are what gateway and storage server must agree on: a gateway with other limits is refused.
The other sections are each process' own. This file is what `objectcache settings` prints.
"""

OTHER_VARIABLE_MEANINGS = {
    ROOT_ACCESS_KEY_VARIABLE: "access key of the root identity; both or neither of the two",
    ROOT_SECRET_KEY_VARIABLE: "its secret; without them both are made once and kept in "
    f"DATA_DIR/{ROOT_CREDENTIALS_FILE}",
    "OBJECTCACHE_CONFIG": "settings file of the servers, where no `--config` is given",
    "OBJECTCACHE_ENDPOINT": "URL that the client and `objectcache bench` talk to",
    "OBJECTCACHE_ACCESS_KEY": "access key of the client",
    "OBJECTCACHE_SECRET_KEY": "secret of the client",
    "OBJECTCACHE_NIC": "name of this host's storage NIC, to which servers pace what clients get",
    "OBJECTCACHE_NIC_BYTES_PER_S": "what that NIC carries, bytes per second",
    "OBJECTCACHE_RELAYS": "URLs of relays over which deliveries may come, as URL or NODE=URL, with "
    "commas between them",
    "OBJECTCACHE_ROUTE": "which way deliveries come: auto, direct, relay:NODE or split",
    "OBJECTCACHE_NODE": "name of the node where this client runs, whose own relay it has no use of",
    "OBJECTCACHE_FETCHER": "URL of this host's fetcher, over which this client's deliveries come",
    "OBJECTCACHE_MASTER_KEY": "32 bytes in base64 that seal the secrets of access keys at rest; "
    "without it they are made once and kept in DATA_DIR/master-key",
    "OBJECTCACHE_ADMIN_ENDPOINT": "URL of the admin API that `objectcache admin` talks to",
    "OBJECTCACHE_ADMIN_TOKEN": "token of the admin API",
}

OTHER_VARIABLES_HEADING = """
## Other environment variables

| variable | meaning |
| --- | --- |"""


def settings_document() -> str:
    """The whole document, ending in a newline."""
    lines = [INTRODUCTION, "| setting | environment variable | default | meaning |"]
    lines += ["| --- | --- | --- | --- |", *_setting_rows(), OTHER_VARIABLES_HEADING]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in OTHER_VARIABLE_MEANINGS.items()]
    return "\n".join(lines) + "\n"


def _setting_rows() -> Iterator[str]:
    for section in SECTIONS:
        for field in setting_fields(section):
            variable = f"{ENVIRONMENT_PREFIX}{section}_{field.name}".upper()
            default = default_text(field.name, field.default)
            meaning = description(field.type)
            yield f"| `{section}.{field.name}` | `{variable}` | {default} | {meaning} |"


def description(annotation: object) -> str:
    """The description that a field's `Annotated` type carries, else nothing."""
    if get_origin(annotation) is not Annotated:
        return ""
    metas = [extra for extra in get_args(annotation) if isinstance(extra, msgspec.Meta)]
    return next((meta.description for meta in metas if meta.description), "")


def default_text(name: str, default: object) -> str:
    """A default as one writes it in a flag; byte counts also in their binary unit."""
    if isinstance(default, tuple):
        default = ",".join(default)
    if default == "":
        return "none"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, int) and "_bytes_" in f"{name}_":
        return f"`{default}`{in_binary_unit(default)}"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"
