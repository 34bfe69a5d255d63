"""What a connector is told by its engine's configuration, in the same words for every engine."""

from __future__ import annotations

import importlib.util
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from objectcache.arguments import (
    checked_encoding,
    checked_encodings,
    checked_rate,
    listed,
    nic_rate_of,
)
from objectcache.channel.authorities import ca_file_of, client_context
from objectcache.channel.credentials_file import read_credentials
from objectcache.channel.endpoint import Endpoint
from objectcache.client import CONNECTIONS_MAX, DEFAULT_REGION, TIMEOUT_S, Client
from objectcache.connectors.store.lossy_setting import check_lossy
from objectcache.core import TransportChoice
from objectcache.landing.memory_file import FILE_BYTES_MIN
from objectcache.landing.regions import Region
from objectcache.landing.target_pool import memory_file_region, pool_bytes_for
from objectcache.landing.targets import SessionTarget
from objectcache.routes.route_settings import checked_dispatch, checked_routes
from objectcache.sessions.fabric_joining import FabricSettings
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import GIB

LOAD_BYTES_MAX = 4 * GIB  # 32,768 tokens of Llama-3.1-8B
LOOKUP_TIMEOUT_S = 0.5  # an engine waits for it before it computes
_FABRIC = FabricSettings()
_URLS = ("relays", "dispatch")
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
    `split_from_bytes`, `nic` and `nic_bytes_per_s` are the client's; what is left out of the last
    two comes from OBJECTCACHE_NIC and OBJECTCACHE_NIC_BYTES_PER_S.
    `split_from_bytes`, `relays`, `route`, `node`, `relay_timeout_s`, `dispatch`, `worker` and
    `fetcher` are the client's, and OBJECTCACHE_FETCHER stands for the last where it is left out;
    relays, and the URLs of the service's replicas, may be a text with commas between them.
    `encodings` is the client's, `auto` or names, which may be such a text too: in which of them
    layers come, and are decoded in the engine's process. Whole chunks come plain all the same.
    `put_encoding` is the client's too: in which chunks are sent, encoded in the engine's process.
    `lossy` is q8, q6, q4 or bins: chunks are stored in that dtype, under other keys, and other
    numbers come back (docs/encodings.md); left out, nothing is lost.
    `dispatch_token_file` holds the service's token.
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
    split_from_bytes: int = 0
    nic: str = ""
    nic_bytes_per_s: float | None = None
    relays: tuple[str, ...] = ()
    route: str = "auto"
    node: str = ""
    relay_timeout_s: float | None = None
    dispatch: tuple[str, ...] = ()
    dispatch_token_file: str = ""
    worker: str = ""
    fetcher: str = ""
    encodings: tuple[str, ...] = ()
    put_encoding: str = ""
    lossy: str = ""

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
        chosen.setdefault("nic", environment.get("OBJECTCACHE_NIC", ""))
        chosen.setdefault("nic_bytes_per_s", nic_rate_of(environment))
        chosen.setdefault("fetcher", environment.get("OBJECTCACHE_FETCHER", ""))
        for name in _URLS:
            if name in chosen:
                chosen[name] = _urls(name, chosen[name])
        chosen["encodings"] = _encodings(chosen.get("encodings", ()))
        for name, value in chosen.items():
            _check_type(name, value)
        _check_words(chosen)
        return cls(**chosen)

    def connect(
        self,
        connections_max: int = CONNECTIONS_MAX,
        make_region: Callable[[int], Region] = memory_file_region,
    ) -> Client:
        """A client. Nothing is sent before its first call. An open delivery holds a connection.

        `make_region` is the client's.
        """
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
            split_from_bytes=self.split_from_bytes,
            nic=self.nic or None,
            nic_bytes_per_s=self.nic_bytes_per_s,
            relays=self.relays,
            route=self.route,
            node=self.node,
            relay_timeout_s=self.relay_timeout_s,
            dispatch=self.dispatch,
            dispatch_token=self.dispatch_token_file or None,
            worker=self.worker,
            fetcher=self.fetcher,
            encodings=self.encodings,
            put_encoding=self.put_encoding,
            make_region=make_region,
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


def _urls(name: str, value: object) -> tuple[str, ...]:
    """URLs, out of a list or a text with commas between them."""
    if isinstance(value, str):
        return tuple(one.strip() for one in value.split(",") if one.strip())
    if isinstance(value, list | tuple):
        found: list[Any] = list(value)  # pyright: ignore[reportUnknownArgumentType]
        if all(isinstance(one, str) for one in found):
            return tuple(found)
    raise InvalidRequest(
        f"connector setting {name!r} must be URLs, in a list or with commas between them, got "
        f"{value!r}"
    )


def _encodings(value: Any) -> tuple[str, ...]:
    """Names, out of a list or a text with commas between them; or what stands for `auto`."""
    try:
        if isinstance(value, str) and value != "auto":
            return checked_encodings(listed(value))
        return checked_encodings(value)
    except InvalidRequest as error:
        raise InvalidRequest(f"connector setting 'encodings': {error.message}") from error


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
    check_lossy(chosen.get("lossy", ""))
    _check_routes(chosen)
    checked_encoding("connector setting 'put_encoding'", chosen.get("put_encoding", ""))
    if not _BUCKET.fullmatch(chosen["bucket"]):
        raise InvalidRequest(
            f"connector setting 'bucket' must be 3 to 63 of a-z 0-9 . -, got {chosen['bucket']!r}"
        )


def _check_routes(chosen: Mapping[str, Any]) -> None:
    dispatch, token_file = chosen.get("dispatch", ()), chosen.get("dispatch_token_file", "")
    try:
        source = checked_dispatch(dispatch, token_file or None, chosen.get("worker", ""))
        routes = checked_routes(
            chosen.get("relays", ()),
            chosen.get("route", "auto"),
            chosen.get("node", ""),
            0,
            chosen.get("relay_timeout_s"),
            source,
            chosen.get("fetcher", ""),
        )
        routes.check_route()
    except InvalidRequest as error:
        names = (
            "relays, route, node, relay_timeout_s, dispatch, dispatch_token_file, worker, fetcher"
        )
        raise InvalidRequest(f"connector settings {names}: {error.message}") from error


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
    elif name == "split_from_bytes":
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InvalidRequest(
                f"connector setting {name!r} must be bytes, or 0 for never, got {value!r}"
            )
    elif name == "nic_bytes_per_s":
        checked_rate(f"connector setting {name!r}", value)
    elif name in _URLS or name in ("encodings", "relay_timeout_s"):
        return  # checked when they were taken apart, or are as a client's
    elif not isinstance(value, str) and not (name == "ca_file" and value is None):
        raise InvalidRequest(
            f"connector setting {name!r} must be a string, got {type(value).__name__}"
        )
