"""Certificates for tests: an authority, and pairs that it signs, as PEM files."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

DAY = dt.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Pair:
    """PEM files of a certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates and keeps the files in `directory`."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._name = _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(self._name, self._name, self._key.public_key(), 0, 30)
        certificate = builder.add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        ).sign(self._key, hashes.SHA256())
        self.file = directory / f"{name}.pem"
        self.file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def pair(
        self,
        name: str,
        *,
        begins_days: float = -1,
        ends_days: float = 20,
        host: str = "localhost",
        rsa_key: bool = False,
        passphrase: bytes | None = None,
    ) -> Pair:
        """A pair for `host`, a name or an address, and for "localhost" 127.0.0.1, too; a second one
        of that name replaces the files.
        """
        key = (
            rsa.generate_private_key(65537, 2048)
            if rsa_key
            else ec.generate_private_key(ec.SECP256R1())
        )
        names: list[x509.GeneralName] = [_host_name(host)]
        if host == "localhost":
            names.append(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
        certificate = (
            _builder(_name(name), self._name, key.public_key(), begins_days, ends_days)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pair = Pair(self._directory / f"{name}.crt", self._directory / f"{name}.key")
        encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if passphrase is not None:
            encryption = serialization.BestAvailableEncryption(passphrase)
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
            )
        )
        pair.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return pair


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def serial_number(certificate_der: bytes) -> int:
    """Which certificate a server showed."""
    return x509.load_der_x509_certificate(certificate_der).serial_number


def serial_number_of(pair: Pair) -> int:
    """Which certificate lies in the files."""
    return x509.load_pem_x509_certificate(pair.certificate.read_bytes()).serial_number


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey | rsa.RSAPublicKey,
    begins_days: float,
    ends_days: float,
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + begins_days * DAY)
        .not_valid_after(now + ends_days * DAY)
    )
