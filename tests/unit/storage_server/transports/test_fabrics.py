"""Which fabrics a server has: by its settings, and by what is installed."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from objectcache_runtime.settings import StorageSettings
from objectcache_schemas.errors import (
    AccessDenied,
    InvalidRequest,
    ObjectCacheError,
    Unavailable,
    Unsupported,
)
from objectcache_schemas.limits import MIB
from objectcache_storage_server.transports.fabrics import (
    Fabrics,
    check_nixl_devices,
    check_transport,
    warn_of_unserved_devices,
)


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
        with pytest.raises(
            Unavailable, match="the storage server: NIXL cannot be started"
        ) as caught:
            refused.open("nixl", b"", "root")
        said = f"its storage.nixl_devices is {settings.get('nixl_devices', 'lo')!r}"
        assert said in caught.value.message
    served = Fabrics(StorageSettings(nixl_devices="", nixl_ucx="TLS=tcp"))
    peer, names = served.open("nixl", b"", "root")
    assert names
    peer.close()


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """A /sys/class with devices lo, eth0 and eth0.100, and the second port of mlx5_0."""
    for name in ("lo", "eth0", "eth0.100"):
        (tmp_path / "net" / name).mkdir(parents=True)
    (tmp_path / "net" / "bonding_masters").touch()
    (tmp_path / "infiniband" / "mlx5_0" / "ports" / "1").mkdir(parents=True)
    (tmp_path / "infiniband" / "mlx5_1" / "ports" / "2").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("devices", ["", "lo", "eth0.100", "mlx5_0", "mlx5_0:1", "mlx5_1:2"])
def test_a_nixl_device_of_this_host_is_taken(system: Path, devices: str) -> None:
    pytest.importorskip("nixl_cu12")
    check_nixl_devices(StorageSettings(nixl_devices=devices), system)


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ("mlx5_0:2", "names mlx5_0:2, which this host does not have; it has mlx5_0:1, mlx5_1:2, "),
        ("mlx5_1", "does not have"),
        ("eth1", "it has mlx5_0:1, mlx5_1:2, eth0, eth0.100, lo"),
        ("bonding_masters", "does not have"),
        ("mlx9_0:1,mlx5", "names several devices"),
        ("../lo", "must name a device as UCX does"),
        ("eth0;", "must name a device as UCX does"),
    ],
)
def test_a_nixl_device_that_is_none_of_this_host_is_refused_at_the_start(
    system: Path, devices: str, said: str
) -> None:
    pytest.importorskip("nixl_cu12")
    with pytest.raises(InvalidRequest, match=re.escape(said)) as caught:
        check_nixl_devices(StorageSettings(nixl_devices=devices), system)
    assert caught.value.message.startswith("storage.nixl_devices ")


def test_nixl_devices_are_not_looked_for_where_nixl_is_off_or_none_are_listed(
    system: Path, tmp_path: Path
) -> None:
    check_nixl_devices(StorageSettings(nixl="off", nixl_devices="a,b"), system)
    check_nixl_devices(StorageSettings(nixl_devices="eth1"), tmp_path / "none")


def test_devices_that_no_library_serves_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_unserved_devices(StorageSettings(nixl="off"))
    assert caplog.text == ""
    warn_of_unserved_devices(StorageSettings(nixl="off", nixl_devices="mlx5_0:1"))
    assert "storage.nixl_devices is not used: storage.nixl is off" in caplog.text
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    monkeypatch.setitem(sys.modules, "pyverbs.pyverbs_error", None)
    warn_of_unserved_devices(StorageSettings(nixl_devices="mlx5_0:1", verbs_device="mlx5_0"))
    assert "the package nixl_cu12 is not installed" in caplog.text
    assert "storage.verbs_device is not used: verbs need pyverbs" in caplog.text


def test_a_refusal_repeats_little_of_the_transport_s_name() -> None:
    fabrics = Fabrics(StorageSettings(nixl="off"))
    long_name = "x" * 900_000
    with pytest.raises(Unsupported, match="900000 characters") as caught:
        check_transport(long_name)
    assert len(caught.value.message) < 400
    with pytest.raises(Unsupported, match="900000 characters") as caught:
        fabrics.open(long_name, b"", "root")
    assert len(caught.value.message) < 400


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
