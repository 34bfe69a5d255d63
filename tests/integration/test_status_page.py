"""The status page as a browser shows it, and who may see it."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest

import objectcache
from objectcache_laboratory.replay.kv_bytes import KvBytes
from tests.integration.served import QUIET_SETTINGS, Served, own_environment

LAYOUT = objectcache.KvLayout(
    num_layers=4,
    chunk_tokens=16,
    per_layer_chunk_bytes=4096,
    dtype="bfloat16",
    fingerprint="status-page",
)
QUIET = [word for text in QUIET_SETTINGS for word in ("--set", text)]
BROWSER_BOUND_S = 100.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("page")
    with Served(folder / "data", "--set", "admin.status_page=true", *QUIET) as running:
        running.wait_ready()
        yield running


def admin_url(served: Served) -> str:
    return next(line.split()[-1] for line in served.printed if line.startswith("admin "))


def token_of(served: Served, scope: str) -> str:
    made = subprocess.run(
        [
            *(sys.executable, "-m", "objectcache_operations", "admin", "token", "create", "page"),
            *("--scope", scope, "--data-dir", str(served.data_dir), "--json"),
        ],
        capture_output=True,
        text=True,
        check=True,
        env=own_environment(),
    )
    return str(json.loads(made.stdout)["token"])


def basic(token: str) -> str:
    return "Basic " + base64.b64encode(f"anybody:{token}".encode()).decode()


def get(url: str, authorization: str | None = None) -> tuple[int, Message, str]:
    request = urllib.request.Request(url)
    if authorization is not None:
        request.add_header("Authorization", authorization)
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, response.headers, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read().decode()


def deliver_a_prefix(served: Served, name: str) -> None:
    access_key, secret_key = served.credentials
    with objectcache.Client(
        served.endpoint, access_key=access_key, secret_key=secret_key
    ) as client:
        bucket = client.kv_bucket(name, LAYOUT, create=True)
        keys = bucket.chunk_keys(list(range(160)))
        bucket.put(keys, KvBytes(LAYOUT).chunks(keys))
        assert bucket.match(keys) == len(keys)
        with bucket.fetch(keys, delivery="layerwise", compute_window_s=0.001) as delivery:
            for layer in range(LAYOUT.num_layers):
                delivery.wait_layer(layer)


def test_a_browser_shows_what_was_delivered(served: Served, tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    deliver_a_prefix(served, "in-a-browser")
    host = admin_url(served).removeprefix("http://")
    shown = subprocess.run(
        [
            *(chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *("--virtual-time-budget=4000", f"--user-data-dir={tmp_path / 'browser'}"),
            f"http://anybody:{token_of(served, 'status:read')}@{host}/status",
        ],
        capture_output=True,
        text=True,
        timeout=BROWSER_BOUND_S,
        check=False,
    )
    page = shown.stdout
    assert "serving, engine local" in page, page[:3000] + shown.stderr[-2000:]
    assert "100.0 %" in page
    assert "stall_dynamic, no cap" in page
    assert 'aria-label="4 layers in ' in page
    assert "in-a-browser" in page


def test_the_page_and_its_data_need_a_token_with_its_scope(served: Served) -> None:
    right, wrong = token_of(served, "status:read"), token_of(served, "users:read")
    for path in ("/status", "/status/status.js", "/status/status.css", "/status/data"):
        url = admin_url(served) + path
        status, headers, _ = get(url)
        assert (status, headers["WWW-Authenticate"][:5]) == (401, "Basic"), path
        assert get(url, basic("no-token"))[0] == 401
        assert get(url, "Basic %%%")[0] == 401
        assert get(url, basic(wrong))[0] == 403
        assert get(url, basic(right))[0] == 200
        assert get(url, f"Bearer {right}")[0] == 200
    # Elsewhere a browser's kind of credentials is none, so that no page can make it send a change.
    assert get(admin_url(served) + "/v1/schedule", basic(right))[0] == 401


def test_the_page_may_run_and_ask_only_what_is_its_own(served: Served) -> None:
    _, headers, page = get(admin_url(served) + "/status", basic(token_of(served, "status:read")))
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "<script>" not in page
    assert "style=" not in page


def test_the_page_is_off_by_default(tmp_path: Path) -> None:
    with Served(tmp_path / "data", *QUIET) as served:
        served.wait_ready()
        token = token_of(served, "status:read")
        status, _, text = get(admin_url(served) + "/status", basic(token))
    assert status == 404
    assert "admin.status_page" in text
