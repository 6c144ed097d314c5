"""A conversation between two requests: its tokens, its blocks and its times, and the form it is stored in.

A value: who keeps it, and for how long, is for `sessions` to say. Knows no Redis and no engine.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.errors import InvalidRequest
from shoal.kv import DIGEST_BYTES, BlockHash

# Magic and version, length of the header, checksum of all that follows.
_FRAME = struct.Struct("<4sII")
_MAGIC = b"SHS1"


@dataclass(frozen=True, slots=True, order=True)
class SessionKey:
    tenant: str
    session_id: str


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation: all its tokens, the last answer's without a stop token.

    blocks: its leading full blocks whose KV was computed as a prompt and handed to the tiers. life: how often its name was
    deleted before, as far as that is not forgotten. Times are seconds of the wall clock.
    One without a turn is new, or deleted: then its blocks are those that are still to be deleted.
    """

    key: SessionKey
    model_digest: str
    token_ids: tuple[int, ...] = ()
    num_turns: int = 0
    blocks: tuple[BlockHash, ...] = ()
    created_at: float = 0.0
    used_at: float = 0.0
    expires_at: float = 0.0
    life: int = 0

    @property
    def is_deleted(self) -> bool:
        return self.num_turns == 0

    @property
    def version(self) -> tuple[float, ...]:
        """Of two records of a session, that with the greater version is the newer one."""
        # Settling adds blocks, and deleting takes them away.
        return (self.life, self.num_turns, self.used_at, -len(self.blocks) if self.is_deleted else len(self.blocks))

    def pack(self) -> bytes:
        header = json.dumps(
            {
                "tenant": self.key.tenant,
                "session_id": self.key.session_id,
                "model": self.model_digest,
                "tokens": len(self.token_ids),
                "turns": self.num_turns,
                "created_at": self.created_at,
                "used_at": self.used_at,
                "expires_at": self.expires_at,
                "life": self.life,
            }
        ).encode()
        body = header + struct.pack(f"<{len(self.token_ids)}I", *self.token_ids) + b"".join(self.blocks)
        return _FRAME.pack(_MAGIC, len(header), zlib.crc32(body)) + body


def unpack(key: SessionKey, packed: bytes) -> Session:
    """Read a stored session. Raises InvalidRequest for what is none: only deleting it helps then."""
    try:
        return _unpacked(packed)
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise InvalidRequest(
            "session_id", f"what is stored of session {key.session_id!r} is damaged or of another version; delete it"
        ) from error


def _unpacked(packed: bytes) -> Session:
    magic, num_header, checksum = _FRAME.unpack_from(packed)
    body = packed[_FRAME.size :]
    if magic != _MAGIC or zlib.crc32(body) != checksum:
        raise ValueError("not a session")
    header = json.loads(body[:num_header])
    num_tokens = header["tokens"]
    blocks = body[num_header + 4 * num_tokens :]
    return Session(
        key=SessionKey(header["tenant"], header["session_id"]),
        model_digest=header["model"],
        token_ids=struct.unpack_from(f"<{num_tokens}I", body, num_header),
        num_turns=header["turns"],
        blocks=tuple(BlockHash(blocks[at : at + DIGEST_BYTES]) for at in range(0, len(blocks), DIGEST_BYTES)),
        created_at=header["created_at"],
        used_at=header["used_at"],
        expires_at=header["expires_at"],
        life=header.get("life", 0),
    )


def readable(key: SessionKey, packed: bytes | None) -> Session | None:
    """The same, but None for what is not there or damaged."""
    try:
        return None if packed is None else unpack(key, packed)
    except InvalidRequest:
        return None


def newest(key: SessionKey, records: Iterable[bytes | None]) -> bytes | None:
    """Of the records of a session the newest; one that is damaged only if there is no other."""
    different = {record for record in records if record is not None}
    if len(different) <= 1:
        return next(iter(different), None)

    def version(record: bytes) -> tuple[float, ...]:
        session = readable(key, record)
        return () if session is None else session.version

    return max(different, key=version)
