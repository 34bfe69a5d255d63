"""Which fabrics a server has: by its settings, and by what is installed."""

from __future__ import annotations

from typing import Any

import pytest

from objectcache_schemas.errors import (
    AccessDenied,
    InvalidRequest,
    ObjectCacheError,
    Unavailable,
    Unsupported,
)
from objectcache_schemas.limits import MIB
from objectcache_schemas.settings import StorageSettings
from objectcache_storage_server.fabrics import Fabrics


@pytest.mark.parametrize(
    ("settings", "transport", "kind", "why"),
    [
        ({"nixl": "off"}, "nixl", Unsupported, r"storage\.nixl is off"),
        ({"verbs_device": ""}, "verbs", Unsupported, r"storage\.verbs_device names no device"),
        ({"nixl": "off"}, "pigeon", Unsupported, "there are shared_memory, nixl and verbs"),
    ],
)
def test_a_fabric_that_is_not_served_is_refused_with_the_setting(
    settings: dict[str, Any], transport: str, kind: type[ObjectCacheError], why: str
) -> None:
    fabrics = Fabrics(StorageSettings(**settings))
    with pytest.raises(kind, match=why):
        fabrics.open(transport, b"", "alice")
    assert repr(fabrics).startswith("<Fabrics []")


@pytest.mark.parametrize(
    "settings",
    [{"nixl_devices": "nosuch0"}, {"nixl_ucx": "TLS=nosuch"}],  # storage.nixl_devices, .nixl_ucx
)
def test_settings_that_nixl_refuses_are_an_error_of_ours_that_others_do_not_suffer_from(
    settings: dict[str, Any],
) -> None:
    pytest.importorskip("nixl_cu12")
    refused = Fabrics(StorageSettings(**settings))
    for _ in range(2):
        with pytest.raises(Unavailable, match="NIXL cannot be started"):
            refused.open("nixl", b"", "root")
    served = Fabrics(StorageSettings(nixl_devices="", nixl_ucx="TLS=tcp"))
    peer, names = served.open("nixl", b"", "root")
    assert names
    peer.close()


def test_a_user_is_refused_with_the_remedy_unless_all_are_trusted_and_root_is_not() -> None:
    pytest.importorskip("nixl_cu12")
    fabrics = Fabrics(StorageSettings())
    with pytest.raises(AccessDenied, match=r"verbs, shared memory or bodies.*nixl=trusting"):
        fabrics.open("nixl", b"", "alice")
    peer, _ = fabrics.open("nixl", b"", "root")
    peer.close()
    trusting = Fabrics(StorageSettings(nixl="trusting"))
    peer, _ = trusting.open("nixl", b"", "alice")
    peer.close()
    fabrics.close()
    trusting.close()


def test_a_verbs_device_that_is_not_there_is_refused() -> None:
    """storage.verbs_device; or the package is missing, which is said first."""
    fabrics = Fabrics(StorageSettings(verbs_device="none0"))
    with pytest.raises((Unavailable, InvalidRequest), match=r"none0|pyverbs"):
        fabrics.open("verbs", b"", "alice")


def test_staging_memory_is_whole_buffers_within_storage_fabric_staging_bytes() -> None:
    sizes: dict[str, Any] = {"fragment_bytes": 3 * MIB, "target_fragment_bytes_max": 3 * MIB}
    staging = Fabrics(StorageSettings(fabric_staging_bytes=10 * MIB, **sizes)).staging
    assert (staging.buffer_bytes, staging.capacity_bytes) == (3 * MIB, 9 * MIB)
    least = Fabrics(StorageSettings(fabric_staging_bytes=1 * MIB, **sizes)).staging
    assert least.capacity_bytes == 3 * MIB  # nothing could be delivered with less
