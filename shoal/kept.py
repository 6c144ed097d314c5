"""What an orchestrator keeps between requests, as the SDK's callers get it: reused KV, warmed prompts, sessions.

Plain frozen values made from messages, and the messages that ask for them. Does no I/O. Called by `shoal.client` and
`shoal.generation`.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.v1 import admin_pb2, inference_pb2


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What of a prompt was not computed because its KV was kept.

    from_redis_tokens: of these, tokens that at least one stage fetched from Redis; the others were in workers' memory.
    codec: the coarsest, f32 (lossless), int8 or k4v4; empty without cached tokens. is_exact: no lossy ones among them.
    """

    cached_tokens: int = 0
    from_redis_tokens: int = 0
    codec: str = ""
    is_exact: bool = True


@dataclass(frozen=True, slots=True)
class Warmed:
    """kept_tokens: those in full blocks, which are the ones kept. cached_tokens: of these, what was there already."""

    prompt_tokens: int
    kept_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Anticipated:
    """What workers fetch for a prompt that is being typed, as far as they lack it: blocks in Redis, of so many prefixes."""

    num_prefixes: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """A conversation that is kept. kept_tokens: tokens in full blocks whose KV was handed to the tiers."""

    session_id: str
    num_turns: int
    num_tokens: int
    kept_tokens: int
    idle_s: float
    expires_in_s: float


@dataclass(frozen=True, slots=True)
class DeletedSession:
    """Blocks that went with a session, and those that others go on using."""

    num_blocks_deleted: int
    num_blocks_shared: int


def cache_use_from_proto(message: inference_pb2.CacheUse) -> CacheUse:
    if not message.cached_tokens:
        return CacheUse()
    return CacheUse(message.cached_tokens, message.from_redis_tokens, message.codec, message.is_exact)


def warmed_from_proto(message: admin_pb2.WarmResponse) -> Warmed:
    return Warmed(message.prompt_tokens, message.kept_tokens, message.cached_tokens)


def anticipated_from_proto(message: inference_pb2.AnticipateResponse) -> Anticipated:
    return Anticipated(message.num_prefixes, message.num_blocks)


def sessions_from_proto(message: admin_pb2.ListSessionsResponse) -> tuple[SessionStatus, ...]:
    return tuple(
        SessionStatus(
            session_id=one.session_id,
            num_turns=one.num_turns,
            num_tokens=one.num_tokens,
            kept_tokens=one.kept_tokens,
            idle_s=one.idle_s,
            expires_in_s=one.expires_in_s,
        )
        for one in message.sessions
    )


def deleted_from_proto(message: admin_pb2.DeleteSessionResponse) -> DeletedSession:
    return DeletedSession(message.num_blocks_deleted, message.num_blocks_shared)
