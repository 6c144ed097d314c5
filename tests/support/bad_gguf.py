"""A corpus of bad GGUF files: crafted one by one, each with what must be said of it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from modelstore.store import ModelStore
from shoal.errors import ShoalError
from tests.support.raw_gguf import (
    ALIGNMENT,
    ARRAY,
    KEYS_AT,
    STRING,
    TENSORS_AT,
    U32,
    U64,
    VERSION_AT,
    RawGguf,
    RawTensor,
    array,
    f32,
    sound,
    string,
    text,
    u32,
)

BadFile = tuple[Callable[[], bytes], str]

HUGE = 1 << 60
EMBEDDING, QUERY = "token_embd.weight", "blk.0.attn_q.weight"
SOUND = sound().content()
# Where one number should be.
SEVERAL = (ARRAY, array(U32, [bytes(4)] * 2))


def reshaped(*shape: int) -> Callable[[RawTensor], RawTensor]:
    return lambda tensor: replace(tensor, shape=shape)


def moved(offset: int) -> Callable[[RawTensor], RawTensor]:
    return lambda tensor: replace(tensor, offset=offset)


def typed(type_id: int) -> Callable[[RawTensor], RawTensor]:
    return lambda tensor: replace(tensor, type_id=type_id)


def with_bytes(at: int, content: bytes) -> bytes:
    return SOUND[:at] + content + SOUND[at + len(content) :]


def with_half(name: str, value: float) -> RawGguf:
    """With the first scale of a quantised tensor overwritten."""
    half = np.float16(value).tobytes()
    return sound().with_tensor(name, lambda tensor: replace(tensor, data=half + tensor.data[2:]))


def key(kind: int, value: bytes) -> RawGguf:
    return sound().with_keys(test__key=(kind, value))


def nested_arrays(depth: int) -> bytes:
    return struct.pack("<IQ", ARRAY, 1) * depth + array(U32, [bytes(4)])


def renamed(old: str, new: str) -> bytes:
    return SOUND.replace(old.encode(), new.encode())


# Makes the bytes of a file; and what its error must say.
BAD_FILES: dict[str, BadFile] = {
    "empty": (lambda: b"", "has 0 bytes, too few"),
    "magic alone": (lambda: b"GGUF", "has 4 bytes, too few"),
    "archive": (lambda: b"PK\x03\x04" + SOUND[4:], "not a GGUF file: it starts with"),
    "zeros": (lambda: bytes(4096), "not a GGUF file"),
    "tensor count 2^60": (lambda: with_bytes(TENSORS_AT, struct.pack("<Q", HUGE)), f"a header of {HUGE} tensors wants"),
    "key count 2^60": (lambda: with_bytes(KEYS_AT, struct.pack("<Q", HUGE)), f"a header of {HUGE} keys wants"),
    "key count 2^64 - 1": (lambda: with_bytes(KEYS_AT, b"\xff" * 8), "keys wants"),
    "one key too many": (lambda: sound(num_keys=14).content(), "the name of tensor 0 is"),
    "one key too few": (lambda: sound(num_keys=12).content(), "the name of tensor 0|has .* dimensions"),
    "one tensor too many": (lambda: sound(num_tensors=12).content(), "the name of tensor 11"),
    "key name 2^60": (lambda: with_bytes(24, struct.pack("<Q", HUGE)), "the name of key 0 is .* bytes long, at most"),
    "key name not UTF-8": (lambda: SOUND.replace(b"llama.block", b"llam\xff.block"), "the name of key 1 is not UTF-8"),
    "key name that moves the cursor": (lambda: renamed("llama.block_count", "llama.b\x1b[2Jcount"), "cannot be shown"),
    "unknown value type": (lambda: key(13, bytes(8)).content(), "key test.key has the unknown value type 13"),
    "string 2^60": (lambda: key(STRING, struct.pack("<Q", HUGE)).content(), f"key test.key wants {HUGE} bytes"),
    "string 2^64 - 1": (lambda: key(STRING, b"\xff" * 8).content(), "key test.key wants"),
    "string not UTF-8": (lambda: key(STRING, string(b"\xc3\x28")).content(), "key test.key is not UTF-8"),
    "array of strings 2^60": (
        lambda: key(ARRAY, array(STRING, [], HUGE)).content(),
        f"test.key, an array of {HUGE} strings",
    ),
    "array of numbers 2^60": (
        lambda: key(ARRAY, array(U64, [], HUGE)).content(),
        f"test.key, an array of {HUGE} values",
    ),
    "array that overflows": (lambda: key(ARRAY, array(U64, [], 1 << 61)).content(), "key test.key, an array of"),
    "array of an unknown type": (
        lambda: key(ARRAY, array(13, [])).content(),
        "key test.key is an array of value type 13",
    ),
    "array in array": (lambda: key(ARRAY, nested_arrays(1)).content(), "key test.key is an array of value type 9"),
    "arrays 2^16 deep": (
        lambda: key(ARRAY, nested_arrays(1 << 16)).content(),
        "key test.key is an array of value type 9",
    ),
    "a million keys": (lambda: sound(num_keys=1_000_000, more=bytes(13_000_000)).content(), "1000000 keys is too much"),
    "three million strings": (
        lambda: key(ARRAY, array(STRING, [bytes(24_000_000)], 3_000_000)).content(),
        "makes 3000007 strings in all",
    ),
    "a million tensors": (
        lambda: sound(num_tensors=1_000_000, more=bytes(32_000_000)).content(),
        "1000000 tensors is too",
    ),
    "alignment 0": (lambda: sound().with_keys(general__alignment=u32(0)).content(), "general.alignment is 0"),
    "alignment 2^31": (
        lambda: sound().with_keys(general__alignment=u32(1 << 31)).content(),
        "alignment is 2147483648",
    ),
    "alignment a string": (
        lambda: sound().with_keys(general__alignment=text("32")).content(),
        "general.alignment is 32",
    ),
    "no dimensions": (lambda: sound().with_tensor(QUERY, reshaped()).content(), f"{QUERY} has 0 dimensions"),
    "dimension 0": (lambda: sound().with_tensor(QUERY, reshaped(0, 32)).content(), f"{QUERY} has shape"),
    "dimension 2^60": (
        lambda: sound().with_tensor(QUERY, reshaped(HUGE, 32)).content(),
        f"tensor {QUERY} ends at byte",
    ),
    "dimensions whose product overflows": (
        lambda: sound().with_tensor(QUERY, reshaped(1 << 32, 1 << 32)).content(),
        f"tensor {QUERY} ends at byte",
    ),
    "rows of broken blocks": (
        lambda: sound().with_tensor(QUERY, reshaped(32, 33)).content(),
        f"{QUERY} has shape .* multiple of 32",
    ),
    "offset 2^60": (lambda: sound().with_tensor(QUERY, moved(HUGE)).content(), f"tensor {QUERY} ends at byte"),
    "offset 2^64 - 32": (
        lambda: sound().with_tensor(QUERY, moved((1 << 64) - 32)).content(),
        f"tensor {QUERY} ends at byte",
    ),
    "offset off the grid": (lambda: sound().with_tensor(QUERY, moved(1)).content(), f"{QUERY} starts at 1,"),
    "overlapping tensors": (
        lambda: sound().with_tensor(QUERY, moved(ALIGNMENT)).content(),
        f"tensors {EMBEDDING} and {QUERY} overlap",
    ),
    "two tensors in one place": (lambda: sound().with_tensor("blk.0.ffn_norm.weight", moved(160)).content(), "overlap"),
    "tensor twice": (lambda: renamed("blk.0.attn_k", "blk.0.attn_q"), f"tensor {QUERY} is given twice"),
    "key twice": (lambda: renamed("ggml.tokens", "ggml.merges"), "tokenizer.ggml.merges is given twice"),
    "tensor missing": (lambda: sound().without(QUERY).content(), f"tensor {QUERY} is missing"),
    "embedding missing": (lambda: sound().without(EMBEDDING).content(), f"{EMBEDDING} is missing"),
    "architecture missing": (
        lambda: sound().without("general.architecture").content(),
        "general.architecture is missing",
    ),
    "parts no number": (lambda: sound().with_keys(split__count=SEVERAL).content(), "split.count should be a int"),
    "part no number": (lambda: sound().with_keys(split__no=SEVERAL).content(), "split.no should be a int"),
    "total of tensors no number": (
        lambda: sound().with_keys(split__tensors__count=SEVERAL).content(),
        "split.tensors.count should be a int",
    ),
    "no layers": (lambda: sound().with_keys(llama__block_count=u32(0)).content(), "llama.block_count is 0"),
    "2^31 layers": (
        lambda: sound().with_keys(llama__block_count=u32(1 << 31)).content(),
        "block_count is 2147483648",
    ),
    "2^31 heads": (
        lambda: sound().with_keys(llama__attention__head_count=u32(1 << 31)).content(),
        "count is 2147483648",
    ),
    "no heads": (lambda: sound().with_keys(llama__attention__head_count=u32(0)).content(), "head_count is 0"),
    "epsilon no number": (
        lambda: sound().with_keys(llama__attention__layer_norm_rms_epsilon=f32(float("nan"))).content(),
        "layer_norm_rms_epsilon is nan",
    ),
    "tokens no strings": (
        lambda: sound().with_keys(tokenizer__ggml__tokens=u32(4)).content(),
        "tokenizer.ggml.tokens should be",
    ),
    "too few tokens": (
        lambda: sound().with_keys(tokenizer__ggml__tokens=(ARRAY, array(STRING, [string("a")]))).content(),
        "tokenizer.ggml.tokens has 1 entries",
    ),
    "scale infinite": (lambda: with_half(QUERY, np.inf).content(), f"tensor {QUERY} has values that are infinite"),
    "scale no number": (
        lambda: with_half(EMBEDDING, np.nan).content(),
        f"tensor {EMBEDDING} has values that are infinite",
    ),
    "float no number": (
        lambda: with_half("blk.0.attn_v.weight", np.nan).content(),
        "tensor blk.0.attn_v.weight has values",
    ),
}
UNSUPPORTED_FILES: dict[str, BadFile] = {
    "version 0": (lambda: with_bytes(VERSION_AT, struct.pack("<I", 0)), "version 0"),
    "version 1": (lambda: with_bytes(VERSION_AT, struct.pack("<I", 1)), "version 1"),
    "version 4": (lambda: with_bytes(VERSION_AT, struct.pack("<I", 4)), "version 4"),
    "big-endian version 2": (lambda: with_bytes(VERSION_AT, struct.pack(">I", 2)), "big-endian"),
    "big-endian version 3": (lambda: with_bytes(VERSION_AT, struct.pack(">I", 3)), "big-endian"),
    "three dimensions": (
        lambda: sound().with_tensor(QUERY, reshaped(2, 16, 32)).content(),
        f"{QUERY} has 3 dimensions",
    ),
    "unknown tensor type": (
        lambda: sound().with_tensor(QUERY, typed(4096)).content(),
        f"{QUERY} is of type number 4096",
    ),
    "unsupported tensor type": (lambda: sound().with_tensor(QUERY, typed(16)).content(), f"{QUERY} is of type IQ2_XXS"),
    "unknown architecture": (
        lambda: sound().with_keys(general__architecture=text("mamba")).content(),
        "mamba is not supported",
    ),
}


def import_content(content: bytes, folder: Path) -> None:
    """Import bytes as a file; raises what the import raises, and only if nothing was left in the store."""
    path = folder / "model.gguf"
    path.write_bytes(content)
    store = ModelStore(folder / "store")
    try:
        store.import_model(path, "model")
    except ShoalError:
        assert not store.root.exists()
        raise
