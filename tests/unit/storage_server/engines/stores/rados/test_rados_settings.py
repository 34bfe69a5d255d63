"""The URL of a store in RADOS."""

from __future__ import annotations

import pytest

from objectcache_schemas.errors import InvalidRequest
from objectcache_storage_server.engines.stores.rados.rados_settings import RadosSettings


def test_a_url_names_the_pools_and_how_the_cluster_is_found() -> None:
    assert RadosSettings.from_url("rados://kv") == RadosSettings("kv")
    url = "rados://kv%20data?conf=/etc/ceph/a.conf&id=cache&log_pool=kv.log&namespace=one"
    assert RadosSettings.from_url(url) == RadosSettings(
        "kv data", "kv.log", namespace="one", client="cache", conf="/etc/ceph/a.conf"
    )


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("rados://", "pool"),
        ("rados:///", "pool"),
        ("s3://kv", "rados://POOL"),
        ("rados://kv/folder", "rados://POOL"),
        ("rados://kv?pools=a", "pools"),
        ("rados://kv?namespace=", "namespace"),
        ("rados://kv?namespace=a.log", "namespace"),
    ],
)
def test_another_is_refused_and_says_why(url: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        RadosSettings.from_url(url)
