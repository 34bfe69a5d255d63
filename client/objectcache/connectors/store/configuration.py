"""What a connector is told by its engine's configuration, in the same words for every engine."""

from __future__ import annotations

import importlib.util
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from objectcache.channel.authorities import ca_file_of, client_context
from objectcache.channel.credentials_file import read_credentials
from objectcache.channel.endpoint import Endpoint
from objectcache.client import CONNECTIONS_MAX, DEFAULT_REGION, TIMEOUT_S, Client
from objectcache.core import TransportChoice
from objectcache.landing.memory_file import FILE_BYTES_MIN
from objectcache.landing.target_pool import pool_bytes_for
from objectcache.landing.targets import SessionTarget
from objectcache.sessions.fabric_joining import FabricSettings
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import GIB

LOAD_BYTES_MAX = 4 * GIB  # 32,768 tokens of Llama-3.1-8B
LOOKUP_TIMEOUT_S = 0.5  # an engine waits for it before it computes
_FABRIC = FabricSettings()
_SECONDS = ("timeout_s", "lookup_timeout_s")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PROFILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_FABRIC_PACKAGES = {
    TransportChoice.NIXL: ("nixl_cu12", "pip install --no-deps nixl-cu12"),
    TransportChoice.VERBS: ("pyverbs", "install the system's package python3-pyverbs"),
}
_VARIABLES = {
    "endpoint": "OBJECTCACHE_ENDPOINT",
    "bucket": "OBJECTCACHE_BUCKET",
    "access_key": "OBJECTCACHE_ACCESS_KEY",
    "secret_key": "OBJECTCACHE_SECRET_KEY",
}


@dataclass(frozen=True, slots=True)
class StoreConfiguration:
    """Where an engine's KV is kept, and how it travels.

    `weights_revision` is part of every key: whatever tells two sets of weights under one model name
    apart; where it is empty, `model_identity` finds one. `lookup_timeout_s` bounds every silence of
    the server in a lookup, which an engine waits for, `timeout_s` in anything else.
    `load_bytes_max` bounds what an engine's loads hold together, each rounded up by
    `file_bytes_for`; a client's memory for them may be a third larger.
    `nixl_devices`, `nixl_ucx` and `verbs_device` are those of `FabricSettings`.
    `compute_profile` names the engine's compute profile on the server, in the place of the name
    that its model leads to; engines that load whole chunks have no use for it.
    `credentials_file` in a mapping names an AWS shared credentials file (its default profile), so
    that no secret stands in a command line.
    """

    endpoint: str
    bucket: str
    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    region: str = DEFAULT_REGION
    transport: str = "auto"
    timeout_s: float = TIMEOUT_S
    ca_file: str | None = None
    weights_revision: str = ""
    lookup_timeout_s: float = LOOKUP_TIMEOUT_S
    load_bytes_max: int = LOAD_BYTES_MAX
    nixl_devices: str = _FABRIC.nixl_devices
    nixl_ucx: str = _FABRIC.nixl_ucx
    verbs_device: str = _FABRIC.verbs_device
    compute_profile: str = ""

    @classmethod
    def from_mapping(
        cls, values: Mapping[str, Any], environment: Mapping[str, str]
    ) -> StoreConfiguration:
        """Read a connector's own configuration; what it lacks comes from OBJECTCACHE_ENDPOINT,
        OBJECTCACHE_BUCKET, OBJECTCACHE_ACCESS_KEY and OBJECTCACHE_SECRET_KEY.

        Raises `InvalidRequest` naming the key that is unknown, of the wrong type, or missing.
        """
        known = {entry.name: entry for entry in fields(cls)}
        unknown = sorted(set(values) - set(known) - {"credentials_file"})
        if unknown:
            allowed = ", ".join([*known, "credentials_file"])
            raise InvalidRequest(
                f"connector setting {unknown[0]!r} is unknown; there are {allowed}"
            )
        chosen = {**_of_file(values.get("credentials_file")), **_without_file(values)}
        for name, variable in _VARIABLES.items():
            if not chosen.get(name):
                chosen[name] = environment.get(variable, "")
            if not chosen[name]:
                raise InvalidRequest(f"connector setting {name!r} is missing; or set {variable}")
        chosen.setdefault("ca_file", ca_file_of(environment))
        for name, value in chosen.items():
            _check_type(name, value)
        _check_words(chosen)
        return cls(**chosen)

    def connect(self, connections_max: int = CONNECTIONS_MAX) -> Client:
        """A client. Nothing is sent before its first call. An open delivery holds a connection."""
        return Client(
            self.endpoint,
            access_key=self.access_key,
            secret_key=self.secret_key,
            region=self.region,
            transport=self.transport,
            timeout_s=self.timeout_s,
            connections_max=connections_max,
            target_bytes_max=pool_bytes_for(self.load_bytes_max),
            tls=_tls(self.ca_file),
            fabric=FabricSettings(self.nixl_devices, self.nixl_ucx, self.verbs_device),
        )

    def put_memory(self, client: Client) -> Callable[[int], SessionTarget] | None:
        """What makes memory that the server reads puts out of, over the configured transport; None
        where puts go in bodies. Calls raise `Unavailable` where the server cannot reach it.
        """
        if self.transport == TransportChoice.BODY.value:
            return None
        if TransportChoice(self.transport).is_fabric:
            return lambda length_bytes: client.fabric_target(length_bytes)
        return client.shared_memory_target


def _tls(ca_file: str | None) -> ssl.SSLContext | None:
    try:
        return client_context(ca_file)
    except InvalidRequest as error:
        raise InvalidRequest(f"connector setting 'ca_file': {error.message}") from error


def _of_file(name: object) -> dict[str, Any]:
    if name is None:
        return {}
    try:
        access_key, secret_key = read_credentials(Path(str(name)))
    except InvalidRequest as error:
        raise InvalidRequest(f"connector setting 'credentials_file': {error.message}") from error
    return {"access_key": access_key, "secret_key": secret_key}


def _without_file(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "credentials_file"}


def _check_words(chosen: Mapping[str, Any]) -> None:
    """Raise `InvalidRequest` now for what the first request would fail with."""
    Endpoint.parse(chosen["endpoint"])
    _check_fabric(TransportChoice.parse(chosen.get("transport", TransportChoice.AUTO.value)))
    profile = chosen.get("compute_profile", "")
    if profile and not _PROFILE.fullmatch(profile):
        raise InvalidRequest(
            "connector setting 'compute_profile' must be 1 to 128 letters, digits, '.', '_', '-' "
            f"and begin with a letter or digit, got {profile!r}"
        )
    if not _BUCKET.fullmatch(chosen["bucket"]):
        raise InvalidRequest(
            f"connector setting 'bucket' must be 3 to 63 of a-z 0-9 . -, got {chosen['bucket']!r}"
        )


def _check_fabric(transport: TransportChoice) -> None:
    """Raise `InvalidRequest` where the library of a fabric that was asked for is missing. Loads
    would fail one by one, each as a miss, and the engine compute everything.
    """
    package, remedy = _FABRIC_PACKAGES.get(transport, ("", ""))
    if package and importlib.util.find_spec(package) is None:
        raise InvalidRequest(
            f"connector setting 'transport' is {transport.value!r}, and {package} is not installed "
            f"in this environment: {remedy}, or set 'transport' to 'auto'"
        )


def _check_type(name: str, value: object) -> None:
    if name in _SECONDS:
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise InvalidRequest(f"connector setting {name!r} must be seconds, got {value!r}")
    elif name == "load_bytes_max":
        if isinstance(value, bool) or not isinstance(value, int) or value < FILE_BYTES_MIN:
            raise InvalidRequest(
                f"connector setting {name!r} must be {FILE_BYTES_MIN} bytes or more, got {value!r}"
            )
    elif not isinstance(value, str) and not (name == "ca_file" and value is None):
        raise InvalidRequest(
            f"connector setting {name!r} must be a string, got {type(value).__name__}"
        )
