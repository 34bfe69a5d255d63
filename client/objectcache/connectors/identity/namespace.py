"""Names of stored KV: everything that makes two engines' bytes differ is part of them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import msgspec

from objectcache_schemas.errors import InvalidRequest

_DIGEST_CHARS = 32  # 128 bits
_SLUG_CHARS_MAX = 64
_NOT_IN_SLUG = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class KvNamespace:
    """What a chunk's bytes depend on besides its tokens.

    `layout` names the order of bytes inside a chunk and its geometry, `hashing` how its tokens were
    hashed; `rank` of `rank_count` is the part of the model that one worker holds (its tensor and
    pipeline ranks together). `model`, `weights_revision` and `configuration` are those of a
    `ModelIdentity`. The part before the last `/` of a key is the namespace, so that a model's KV
    can be listed, granted and expired by prefix.
    """

    model: str
    weights_revision: str
    dtype: str
    layout: str
    hashing: str
    rank: int = 0
    rank_count: int = 1
    configuration: str = ""

    def __post_init__(self) -> None:
        if not self.model:
            raise InvalidRequest("model must not be empty: it is part of every key")
        if not 0 <= self.rank < self.rank_count:
            raise InvalidRequest(
                f"rank must be 0 to {self.rank_count - 1} (rank_count), got {self.rank}"
            )

    @property
    def prefix(self) -> str:
        """`model/digest/rank/`: the digest is over every field."""
        digest = hashlib.sha256(msgspec.msgpack.encode(astuple(self))).hexdigest()
        return f"{model_slug(self.model)}/{digest[:_DIGEST_CHARS]}/{self.rank}/"

    def keys(self, hashes: Sequence[bytes | str]) -> list[str]:
        """The keys of chunks with these hashes; bytes stand for their hex."""
        prefix = self.prefix
        return [prefix + (part.hex() if isinstance(part, bytes) else part) for part in hashes]


def model_slug(model: str) -> str:
    """A model's name or path in letters, digits, `.`, `_` and `-`; its end where it is long."""
    return _NOT_IN_SLUG.sub("-", model).strip("-.")[-_SLUG_CHARS_MAX:] or "model"


def compute_fingerprint(model: str, tensor_ranks: int) -> str:
    """What computes, as servers are told it, and the name under which they look for a compute
    profile: the model's, and on how many ranks its layers are computed where these are several.
    """
    slug = model_slug(model).lstrip("-._")  # a profile's name begins with a letter or digit
    return f"{slug or 'model'}-tp{tensor_ranks}" if tensor_ranks > 1 else slug or "model"


def keys_of_all_ranks(ranks: Sequence[KvNamespace], hashes: Sequence[bytes | str]) -> list[str]:
    """Every rank's key of the first chunk, then of the second, and so on.

    So one match over these tells how many chunks all ranks have: `matched // len(ranks)`.
    """
    by_rank = [rank.keys(hashes) for rank in ranks]
    return [keys[index] for index in range(len(hashes)) for keys in by_rank]
