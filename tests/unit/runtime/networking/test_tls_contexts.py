"""Which certificate files a server starts with, and which it takes while it runs."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import pytest

from objectcache_gateway.connections.https_contexts import server_context
from objectcache_runtime.networking.tls import (
    ReloadingContext,
    certificate_files,
    mutual_client_context,
    mutual_server_context,
)
from objectcache_schemas.errors import InvalidRequest
from tests.certificates import Authority, Pair, serial_number, serial_number_of


def shown_by(context: ReloadingContext, authority: Authority) -> tuple[int, str | None]:
    """Serial number of the certificate that a client gets, and the protocol agreed on."""
    client = ssl.create_default_context(cafile=str(authority.file))
    client.set_alpn_protocols(["h2", "http/1.1"])
    connected = shake_hands(context, client)
    der = connected.getpeercert(binary_form=True)
    assert der is not None
    return serial_number(der), connected.selected_alpn_protocol()


def shake_hands(
    server: ssl.SSLContext, client: ssl.SSLContext, host: str = "localhost"
) -> ssl.SSLObject:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server, server_hostname=host)
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    pending = [ours, theirs]
    for _ in range(10):
        for side in list(pending):
            try:
                side.do_handshake()
                pending.remove(side)
            except ssl.SSLWantReadError:
                continue
    assert not pending
    # In TLS 1.3 a client learns only by reading that its certificate was refused.
    theirs.write(b"x")
    assert ours.read(1) == b"x"
    return ours


def loaded(pair: Pair) -> ReloadingContext:
    context = server_context(str(pair.certificate), str(pair.key))
    assert context is not None
    return context


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_without_files_there_is_no_https() -> None:
    assert server_context("", "") is None


def test_a_key_without_a_certificate_is_refused() -> None:
    with pytest.raises(
        InvalidRequest, match=r"admin\.tls_key is set, admin\.tls_certificate is not"
    ):
        server_context("", "key.pem", "admin")


def test_http_1_1_is_agreed_on_also_with_a_client_that_prefers_http_2(authority: Authority) -> None:
    pair = authority.pair("server")
    assert shown_by(loaded(pair), authority) == (serial_number_of(pair), "http/1.1")


def test_the_key_may_lie_in_the_certificates_file(authority: Authority) -> None:
    pair = authority.pair("server")
    both = pair.certificate
    both.write_bytes(pair.certificate.read_bytes() + pair.key.read_bytes())
    context = server_context(str(both), "")
    assert context is not None
    assert shown_by(context, authority)[0] == serial_number_of(pair)


def test_tls_1_1_is_refused(authority: Authority) -> None:
    client = ssl.create_default_context(cafile=str(authority.file))
    client.minimum_version = ssl.TLSVersion.TLSv1_2
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    context = loaded(authority.pair("server"))
    assert shake_hands(context, client).version() == "TLSv1.2"
    assert context._current.minimum_version == ssl.TLSVersion.TLSv1_2


def test_what_makes_no_valid_pair_is_named_with_its_remedy(authority: Authority) -> None:
    good, other = authority.pair("good"), authority.pair("other")
    expired = authority.pair("expired", begins_days=-3, ends_days=-1)
    early = authority.pair("early", begins_days=1)
    locked = authority.pair("locked", passphrase=b"words")
    empty = good.key.with_name("empty.pem")
    empty.touch()
    cases: list[tuple[Path, Path, str]] = [
        (good.key.with_name("missing.crt"), good.key, "missing.crt: No such file"),
        (good.certificate, good.key.with_name("missing.key"), "missing.key: No such file"),
        (good.certificate, other.key, "other.key is not the key of .*good.crt"),
        (expired.certificate, expired.key, "expired.crt ended at .*; renew it"),
        (early.certificate, early.key, "early.crt begins at .*; check the clock"),
        (locked.certificate, locked.key, "locked.key is encrypted"),
        (good.key, good.key, "good.key holds no certificate"),
        (good.certificate, good.certificate, "good.crt holds no usable private key"),
        (good.certificate, empty, "empty.pem holds no usable private key"),
        (good.certificate, good.key.parent, "Is a directory"),
    ]
    for certificate, key, words in cases:
        with pytest.raises(InvalidRequest, match=f"gateway.tls_certificate.*{words}"):
            loaded(Pair(certificate, key))


def test_a_renewed_pair_is_shown_also_with_a_key_of_another_kind(authority: Authority) -> None:
    context = loaded(authority.pair("server", rsa_key=True))
    assert not context.reload_if_changed()
    renewed = authority.pair("server")
    assert context.reload_if_changed()
    assert shown_by(context, authority)[0] == serial_number_of(renewed)


@pytest.mark.parametrize("broken", ["half renewed", "expired", "gone", "rubbish"])
def test_a_broken_pair_is_logged_once_and_the_one_before_stays(
    authority: Authority, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    pair = authority.pair("server")
    before = serial_number_of(pair)
    context = loaded(pair)
    key = pair.key.read_bytes()
    if broken == "expired":
        authority.pair("server", begins_days=-3, ends_days=-1)
    else:
        authority.pair("server")
    if broken == "half renewed":
        pair.key.write_bytes(key)
    elif broken == "gone":
        pair.key.unlink()
    elif broken == "rubbish":
        pair.certificate.write_bytes(b"\0" * 100)
    with caplog.at_level(logging.ERROR):
        assert not context.reload_if_changed()
        assert not context.reload_if_changed()
    assert len(caplog.records) == 1
    assert "the one before stays" in caplog.text
    assert shown_by(context, authority)[0] == before
    renewed = authority.pair("server")
    assert context.reload_if_changed()
    assert shown_by(context, authority)[0] == serial_number_of(renewed)


def test_a_certificate_that_ends_soon_is_warned_of_once(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    context = loaded(authority.pair("server", ends_days=20))
    context.warn_of_expiry(context.expires_s - 15 * 86400)
    assert not caplog.records
    for _ in range(2):
        context.warn_of_expiry(context.expires_s - 13 * 86400)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "ends in 13.0 days" in caplog.text


class TestMutual:
    """Both sides show a certificate (server.tls_certificate, server.tls_key, server.tls_ca)."""

    def files(self, authority: Authority, pair: Pair) -> tuple[str, str, str, str]:
        return "server", str(pair.certificate), str(pair.key), str(authority.file)

    def test_both_agree_where_each_trusts_the_others_authority(self, authority: Authority) -> None:
        server = mutual_server_context(
            certificate_files(*self.files(authority, authority.pair("storage")))
        )
        client = mutual_client_context(
            certificate_files(*self.files(authority, authority.pair("gateway")))
        )
        assert shake_hands(server, client).version() == "TLSv1.3"

    def test_a_certificate_of_another_authority_is_refused(
        self, authority: Authority, tmp_path: Path
    ) -> None:
        stranger = Authority(tmp_path / "stranger", "stranger")
        server = mutual_server_context(
            certificate_files(*self.files(authority, authority.pair("storage")))
        )
        client = mutual_client_context(
            certificate_files(*self.files(authority, stranger.pair("gateway")))
        )
        with pytest.raises(ssl.SSLCertVerificationError):
            shake_hands(server, client)

    def test_a_server_of_another_name_is_refused(self, authority: Authority) -> None:
        server = mutual_server_context(
            certificate_files(*self.files(authority, authority.pair("storage", host="other")))
        )
        client = mutual_client_context(
            certificate_files(*self.files(authority, authority.pair("gateway")))
        )
        with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
            shake_hands(server, client)

    def test_a_client_without_a_certificate_is_refused(self, authority: Authority) -> None:
        server = mutual_server_context(
            certificate_files(*self.files(authority, authority.pair("storage")))
        )
        client = ssl.create_default_context(cafile=str(authority.file))
        with pytest.raises(ssl.SSLError, match="did not return a certificate"):
            shake_hands(server, client)

    def test_authorities_that_are_none_are_named(self, authority: Authority) -> None:
        pair = authority.pair("storage")
        authority.file.write_text("rubbish")
        with pytest.raises(InvalidRequest, match=r"server.tls_ca: .*holds no certificate"):
            mutual_server_context(certificate_files(*self.files(authority, pair)))
