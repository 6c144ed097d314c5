"""What the KV blocks of a prompt are called: within its tenant, or for all where an operator made a prefix public.

Owns the secret that keeps tenants apart and the set of public blocks, which outlives the process where there is Redis.
Does not know who holds a block (`catalogue`, the engine). Called by `requests`, `conversations` and `warming`; `names` also
from other threads.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from shoal.errors import ConfigError, InvalidRequest
from shoal.kv import BLOCK_TOKENS, DIGEST_BYTES, BlockHash, KVScope, chain, extend, tenant_salt
from shoal.redis_link import AsyncRedisLink

# How workers compute KV and lay it out: float32, positions rotated into the keys.
SCHEME = "f32-rope-1"
SECRET_BYTES = 32
_PUBLIC_KEY = b"shoal:kv:public:"
# A quarter of a million tokens: more are no system prompts.
MAX_PUBLIC_BLOCKS = 4096


class BlockNames:
    """The names of one model's blocks. Invariant: a block that is public has only public ones before it."""

    def __init__(
        self, model_digest: str, secret: bytes, link: AsyncRedisLink | None = None, *, scheme: str = SCHEME
    ) -> None:
        """Raise ConfigError for a secret that is short enough to be guessed."""
        tenant_salt(secret, "")
        self._secret = secret
        self._link = link
        self._model_digest = model_digest
        self._scheme = scheme
        # Replaced, never changed: other threads read it.
        self._public: frozenset[BlockHash] = frozenset()

    def names(self, tenant: str, token_ids: Sequence[int]) -> tuple[BlockHash, ...]:
        """Name the full blocks of a prompt: public ones as long as they go, then the tenant's own."""
        public = self._public_prefix(token_ids)
        own = KVScope(self._model_digest, self._scheme, salt=tenant_salt(self._secret, tenant))
        return public + extend(own, public[-1] if public else None, token_ids[len(public) * BLOCK_TOKENS :])

    def is_public(self, block: BlockHash) -> bool:
        return block in self._public

    async def make_public(self, token_ids: Sequence[int]) -> None:
        """Have the full blocks of these tokens be named alike for all tenants, from now on.

        Raises InvalidRequest if there are too many of them.
        """
        blocks = chain(self._public_scope, token_ids)
        if len(self._public.union(blocks)) > MAX_PUBLIC_BLOCKS:
            raise InvalidRequest(
                "is_public",
                f"more than {MAX_PUBLIC_BLOCKS} blocks of {BLOCK_TOKENS} tokens would be public; none was added",
            )
        self._public |= frozenset(blocks)
        await self.tend()

    async def tend(self) -> None:
        """Come to know what others have made public, and let them know; nothing while Redis is away."""
        if self._link is None:
            return
        members = await self._link.smembers(self._key)
        if members is None:
            return
        stored = frozenset(BlockHash(member) for member in members if len(member) == DIGEST_BYTES)
        await self._link.sadd(self._key, *(self._public - stored))
        self._public |= stored

    def _public_prefix(self, token_ids: Sequence[int]) -> tuple[BlockHash, ...]:
        public, blocks = self._public, tuple[BlockHash, ...]()
        scope = self._public_scope
        for start in range(0, len(token_ids) - BLOCK_TOKENS + 1 if public else 0, BLOCK_TOKENS):
            following = extend(scope, blocks[-1] if blocks else None, token_ids[start : start + BLOCK_TOKENS])
            if following[0] not in public:
                break
            blocks += following
        return blocks

    @property
    def _public_scope(self) -> KVScope:
        return KVScope(self._model_digest, self._scheme)

    @property
    def _key(self) -> bytes:
        return _PUBLIC_KEY + self._public_scope.digest().hex().encode()


def load_secret(path: Path) -> bytes:
    """Read the secret of an installation; the first to ask draws it. Raises ConfigError if neither can be done."""
    try:
        if not path.exists():
            _draw_secret(path)
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the secret that keeps tenants' KV apart cannot be kept in {path}: {error}") from error


def _draw_secret(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(drawn, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_bytes(SECRET_BYTES))
        file.flush()
        os.fsync(file.fileno())
    try:
        # Whole or not at all, and never over one that another process has drawn meanwhile.
        os.link(drawn, path)
    except FileExistsError:
        pass
    finally:
        drawn.unlink()
