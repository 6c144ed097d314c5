"""What a tokenizer.model says, the file of Google's SentencePiece.

Decides which of its models can be done: those of the kind BPE that leave text as it is but for spaces. The only reader of
that format; `tokenizer_hf` calls it.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2

from modelstore.tokenizer_parts import TokenizerParts
from modelstore.tokenizer_rules import SENTENCE_PIECES, SPACE_MARK, USER_DEFINED
from shoal.errors import BadModelFile, UnsupportedModel

NAME = "tokenizer.model"
MAX_BYTES = 32 << 20


def read_parts(content: bytes) -> TokenizerParts:
    """Raise BadModelFile for bytes that are no such file, UnsupportedModel for a kind that cannot be done."""
    model = sentencepiece_model_pb2.ModelProto()
    try:
        model.ParseFromString(content)
    except DecodeError as error:
        raise BadModelFile(
            f"{NAME} is no SentencePiece model: get the file again, or tokenizer.json with it"
        ) from error
    if not model.pieces:
        raise BadModelFile(f"{NAME} has no pieces: get the file again")
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    if trainer.model_type != trainer.BPE:
        kind = sentencepiece_model_pb2.TrainerSpec.ModelType.Name(trainer.model_type)
        raise UnsupportedModel(f"{NAME} is of the kind {kind}; supported is BPE")
    for is_unsupported, what in (
        (bool(normalizer.precompiled_charsmap), f"normalizer {normalizer.name}"),
        (normalizer.remove_extra_whitespaces, "remove_extra_whitespaces"),
        (not normalizer.escape_whitespaces, "escape_whitespaces off"),
        (trainer.treat_whitespace_as_suffix, "treat_whitespace_as_suffix"),
    ):
        if is_unsupported:
            raise UnsupportedModel(
                f"{NAME}: {what} is not supported; supported is text as it is, with spaces as U+2581"
            )
    pieces = list(model.pieces)
    # The library hands out bytes for text that is none.
    if not all(isinstance(piece.piece, str) for piece in pieces):
        raise BadModelFile(f"{NAME} has a piece that is no text: get the file again")
    return TokenizerParts(
        kind=SENTENCE_PIECES,
        tokens={
            token_id: piece.piece.replace(SPACE_MARK, " ") if piece.type == USER_DEFINED else piece.piece
            for token_id, piece in enumerate(pieces)
        },
        types={token_id: piece.type for token_id, piece in enumerate(pieces)},
        scores={token_id: piece.score for token_id, piece in enumerate(pieces)},
        space_prefix="each" if normalizer.add_dummy_prefix else "never",
    )
