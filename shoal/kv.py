"""The names of KV blocks: a chain of SHA-256 digests over token ids, and the keys under which stages store their parts.

Both sides use it: the orchestrator to ask who holds a prefix, workers to store and find blocks. The same in every process
and on every device: nothing here depends on Python's `hash`. It knows no bytes of KV and no tiers.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

from shoal.errors import ConfigError, InternalError
from shoal.types import LayerRange

BlockHash = NewType("BlockHash", bytes)
"""Names a block and, by the chain, all tokens before it: 32 bytes."""
BlockKey = NewType("BlockKey", bytes)
"""Names what one stage stores of a block: 32 bytes."""

BLOCK_TOKENS = 64
DIGEST_BYTES = 32
# A tenant's name can be guessed, so the secret alone keeps others from computing its keys.
MIN_SECRET_BYTES = 16

# Each begins the input of one kind of digest, so that none can be taken for another. Who changes what is hashed must change
# the number as well.
_SALT_TAG = b"shoal kv salt 1\0"
_SCOPE_TAG = b"shoal kv scope 1\0"
_BLOCK_TAG = b"shoal kv block 1\0"
_LAYERS_TAG = b"shoal kv layers 1\0"
_LENGTH = struct.Struct("<I")
_RANGE = struct.Struct("<II")
_TOKEN_BYTES = 4
# The parent of a chain's first block: no digest has this length.
_NO_PARENT = b""
_PUBLIC_SALT = b""


@dataclass(frozen=True, slots=True)
class KVScope:
    """Within what equal tokens mean equal KV that may be shared.

    model_digest: of the manifest. scheme: how KV is computed and laid out, with its version, for example "f32-rope-1"; what
    was not computed by an exact prefill needs another scheme. adapter: "" is none. salt: from tenant_salt; empty is the
    public scope, whose keys everybody can compute: only for prefixes that an operator marks public.
    """

    model_digest: str
    scheme: str
    adapter: str = ""
    salt: bytes = _PUBLIC_SALT

    def __post_init__(self) -> None:
        if len(self.salt) not in (len(_PUBLIC_SALT), DIGEST_BYTES):
            raise ValueError(f"a salt has {DIGEST_BYTES} bytes, or none if the scope is public; not {len(self.salt)}")

    @property
    def is_public(self) -> bool:
        return self.salt == _PUBLIC_SALT

    def digest(self) -> bytes:
        """32 bytes that stand for all fields; no two scopes have the same."""
        fields = (self.model_digest.encode(), self.scheme.encode(), self.adapter.encode(), self.salt)
        return _digest(_SCOPE_TAG, b"".join(map(_with_length, fields)))


def tenant_salt(secret: bytes, tenant: str) -> bytes:
    """Make a tenant's salt; without the operator's secret nobody can compute it, nor the keys of that tenant.

    Raises ConfigError if the secret is short enough to be guessed.
    """
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"the secret that keeps tenants' KV apart has {len(secret)} bytes; it needs at least {MIN_SECRET_BYTES}, "
            "drawn at random"
        )
    return hmac.digest(secret, _SALT_TAG + tenant.encode(), "sha256")


def chain(scope: KVScope, token_ids: Sequence[int]) -> tuple[BlockHash, ...]:
    """Name the full blocks of a sequence that begins with these tokens; what is left after the last has no name.

    Raises InternalError if a token id does not fit 32 bits.
    """
    return extend(scope, None, token_ids)


def extend(scope: KVScope, parent: BlockHash | None, token_ids: Sequence[int]) -> tuple[BlockHash, ...]:
    """Name the full blocks that follow a block (None: that begin a sequence).

    The parent may be of another scope: a tenant's prompt goes on from a public prefix. Raises InternalError if a token id
    does not fit 32 bits, also one that is in no full block.
    """
    tokens = _pack_tokens(token_ids)
    scope_digest = scope.digest()
    hashes: list[BlockHash] = []
    previous: bytes = _NO_PARENT if parent is None else parent
    block_bytes = BLOCK_TOKENS * _TOKEN_BYTES
    for stop in range(block_bytes, len(tokens) + 1, block_bytes):
        block = tokens[stop - block_bytes : stop]
        hashes.append(BlockHash(_digest(_BLOCK_TAG, scope_digest + _with_length(previous) + block)))
        previous = hashes[-1]
    return tuple(hashes)


def layer_key(block: BlockHash, layers: LayerRange) -> BlockKey:
    """Name what the stage with these layers stores of a block; another cut of the layers has other keys."""
    return BlockKey(_digest(_LAYERS_TAG, block + _RANGE.pack(layers.start, layers.stop)))


def _pack_tokens(token_ids: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error as error:
        raise InternalError(f"token ids must be whole numbers in [0, 2^32): {error}") from error


def _with_length(field: bytes) -> bytes:
    """Length first, so that bytes cannot move from one field to the next unnoticed."""
    return _LENGTH.pack(len(field)) + field


def _digest(tag: bytes, content: bytes) -> bytes:
    return hashlib.sha256(tag + content).digest()
