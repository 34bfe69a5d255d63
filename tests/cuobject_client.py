"""A client of S3 over RDMA as those of NIXL, MinIO and AMD are, and how they judge an answer.

It has no RDMA device: it sends the tokens that they send. `Verdict` is what NIXL's protocol helpers
and minio-cpp make of an answer, by rules that differ.
"""

from __future__ import annotations

import enum
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from tests.s3_clients import Answer, send, signed_headers
from tests.servers import RunningServer

TOKEN, REPLY = "x-amz-rdma-token", "x-amz-rdma-reply"
TRANSFERRED = "x-amz-rdma-bytes-transferred"
UNSIGNED = "UNSIGNED-PAYLOAD"
NIC = bytes(10) + b"\xff\xff\x0a\x00\x00\x07"  # 10.0.0.7, as RoCE writes it


def cuobject_token(
    address: int,
    size_bytes: int,
    *,
    key: int = 0x00112233,
    lid: int = 0,
    target: int = 0x01A2B3,
    gid: bytes | None = NIC,
) -> str:
    """A descriptor as cuObject writes it: 81 characters."""
    has_gid = int(gid is not None)
    return (
        f"{address:016x}:{size_bytes:08x}:{key:08x}:{lid:04x}:{target:06x}:{has_gid:01x}:"
        f"{(gid or bytes(16)).hex()}"
    )


def hipobject_token(
    transport: int, address: int, size_bytes: int, *, queue_pair: int = 17, gid: bytes = NIC
) -> str:
    """A token as hipObject writes it: 88 characters."""
    fields = (transport, queue_pair, gid, 0x00112233, address, size_bytes, 1, 0)
    return struct.pack("<BI16sIQQBH", *fields).hex()


class Verdict(enum.Enum):
    """What a client believes after an answer."""

    TRANSFERRED = "the bytes went by RDMA"
    DECLINED = "they did not; fall back"
    FAILED = "an error"


def nixl_verdict(method: str, answer: Answer) -> Verdict:
    """By NIXL's helpers: a write is done with a 200 and an ETag, whatever the reply says; a read
    only with a reply that is the status.
    """
    reply = answer.headers.get(REPLY)
    if method == "PUT" and answer.status == 200 and answer.headers.get("ETag", "").strip('"'):
        return Verdict.TRANSFERRED
    if method == "PUT":
        return Verdict.DECLINED if reply == "501" else Verdict.FAILED
    if reply in (None, "501"):
        return Verdict.DECLINED if answer.status in (200, 206) else Verdict.FAILED
    count = answer.headers.get(TRANSFERRED, "")
    whole = reply == str(answer.status) and reply in ("200", "206") and count.isdecimal()
    return Verdict.TRANSFERRED if whole else Verdict.FAILED


def minio_verdict(method: str, answer: Answer) -> Verdict:
    """By minio-cpp: a write is done with a 200 and an ETag; no reply and 501 decline."""
    reply = answer.headers.get(REPLY, "")
    if method == "PUT" and answer.status == 200 and answer.headers.get("ETag"):
        return Verdict.TRANSFERRED
    if reply in ("", "501"):
        return Verdict.DECLINED
    done = ("200", "204") if method == "PUT" else ("200", "206")
    return Verdict.TRANSFERRED if reply in done else Verdict.FAILED


def hipobject_verdict(method: str, answer: Answer) -> Verdict:
    """By hipObject, which knows the reply alone."""
    reply = answer.headers.get(REPLY, "")
    if re.fullmatch("200:[0-9a-fA-F]{88}|200|204|206|ok", reply):
        return Verdict.TRANSFERRED
    return Verdict.DECLINED if reply == "501" else Verdict.FAILED


JUDGES = (nixl_verdict, minio_verdict, hipobject_verdict)


def draft_flaws(method: str, answer: Answer) -> list[str]:
    """What of an answer breaks the draft's rules for servers."""
    reply, length = answer.headers.get(REPLY), answer.headers.get("Content-Length")
    flaws: list[str] = []
    if answer.status >= 400 and reply is not None:
        flaws.append("an error must not have a reply (7.1)")
    if reply in ("200", "204", "206") and length != "0":
        flaws.append("a transfer has an empty body (8.1)")
    if reply in ("200", "206") and method == "GET" and TRANSFERRED not in answer.headers:
        flaws.append("a read says how much went (8.3)")
    if reply == "501" and method == "PUT" and answer.status != 200:
        flaws.append("a declined write is a 200 (3.3)")
    if reply == "501" and TRANSFERRED in answer.headers:
        flaws.append("nothing was transferred")
    return flaws


@dataclass(frozen=True, slots=True)
class CuObjectClient:
    """Asks for RDMA first and falls back to the body, as the draft has it."""

    server: RunningServer
    token: str

    def ask(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> Answer:
        """One request with the token. Only its own headers decide about the body's length."""
        named = {TOKEN: self.token, **(headers or {})}
        if method == "PUT":
            named.setdefault("Content-Length", str(len(body)))
        payload_hash = named.pop("x-amz-content-sha256", UNSIGNED)
        signed = signed_headers(self.server, method, path, body, named, payload_hash=payload_hash)
        return send(self.server, method, path, body, signed)

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> bytes:
        """The object, by whichever way it came."""
        answer = self.ask("GET", path, headers)
        assert answer.status in (200, 206)
        assert [judge("GET", answer) for judge in JUDGES] == [Verdict.DECLINED] * len(JUDGES)
        assert draft_flaws("GET", answer) == []
        return answer.body

    def put(self, path: str, data: bytes) -> str:
        """Store an object; returns its ETag."""
        answer = self.ask("PUT", path)
        assert [judge("PUT", answer) for judge in JUDGES] == [Verdict.DECLINED] * len(JUDGES)
        assert draft_flaws("PUT", answer) == []
        signed = signed_headers(self.server, "PUT", path, data, payload_hash=UNSIGNED)
        again = send(self.server, "PUT", path, data, signed)
        assert again.status == 200
        return again.headers["ETag"]
