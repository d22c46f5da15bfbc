"""A sentencepiece tokenizer.model as a fast tokenizer, checked against sentencepiece itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tasks.errors import UserError
from tasks.trainer.legacy.probes import check_same_ids

# Kinds of pieces in sentencepiece_model.proto.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
UNIGRAM, BPE = 1, 2
SPACE = "▁"


@dataclass(frozen=True)
class Pieces:
    """A tokenizer.model: `model` as it was read, `processor` as sentencepiece runs it."""

    model: Any
    processor: Any

    @classmethod
    def read(cls, file: Path, name: str) -> Pieces:
        """Raises UserError: no such file, or one that is not sentencepiece's."""
        from google.protobuf.message import DecodeError
        from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

        if not file.is_file():
            raise UserError(f"{name} has no {file.name}, its tokenizer; copy it beside config.json")
        model = sentencepiece_model_pb2.ModelProto()
        try:
            model.ParseFromString(file.read_bytes())
            processor = SentencePieceProcessor(model_file=str(file))
        except (DecodeError, RuntimeError, OSError) as error:
            raise UserError(
                f"{file} is no sentencepiece model ({str(error).splitlines()[0]}), as this family's is; "
                "take the published file (GLM-4 has its own class: zai-org/glm-4-9b-chat-hf)"
            ) from None
        return cls(model, processor)

    def text(self, index: object, name: str) -> str:
        """The piece of an id. Raises UserError: there is no such id."""
        if not isinstance(index, int) or not 0 <= index < len(self.model.pieces):
            raise UserError(
                f"{name}: token {index} is none of the {len(self.model.pieces)} in tokenizer.model; take the "
                "tokenizer.model that was published with the weights"
            )
        return str(self.model.pieces[index].piece)

    @property
    def bos(self) -> str:
        return str(self.processor.id_to_piece(self.processor.bos_id()))

    @property
    def eos(self) -> str:
        return str(self.processor.id_to_piece(self.processor.eos_id()))

    @property
    def unk(self) -> str:
        return str(self.processor.id_to_piece(self.processor.unk_id()))


def from_sentencepiece(
    pieces: Pieces,
    name: str,
    special: Sequence[str] = (),
    added: Sequence[str] = (),
    begin: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """The same ids for the same text. As in sentencepiece, each stretch between special tokens is a text of its own.

    Args:
        special: pieces of the vocabulary that are taken out of a text whole, beside its control pieces.
        added: tokens behind the vocabulary, numbered from its size on.
        begin: what a text begins with where special tokens are asked for.

    Raises:
        UserError: the model uses what cannot be converted, or a text gets other ids.
    """
    entries = list(pieces.model.pieces)
    if any(entry.type == UNUSED for entry in entries) or len({entry.piece for entry in entries}) < len(
        entries
    ):
        raise UserError(f"the tokenizer.model of {name} has unused or double pieces; take the published one")
    tokenizer = Tokenizer(_model(pieces, name))
    _text_steps(tokenizer, pieces)
    control = [entry.piece for entry in entries if entry.type == CONTROL]
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in (*control, *special, *added)]
    )
    for place, token in enumerate(added, start=len(entries)):
        assert tokenizer.token_to_id(token) == place, "a mark is a piece of the vocabulary, too"
    if begin:
        ids = [(token, tokenizer.token_to_id(token)) for token in begin]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*begin, "$A"], pair=[*begin, "$A", *begin, "$B"], special_tokens=ids
        )
    taken = {*control, *special, *added}
    words = [
        entry.piece.replace(SPACE, " ")
        for entry in entries
        if entry.type in (NORMAL, USER_DEFINED) and not any(token in entry.piece for token in taken)
    ]
    check_same_ids(
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        pieces.processor.encode,
        words,
        name,
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=pieces.bos, eos_token=pieces.eos, unk_token=pieces.unk
    )


def _model(pieces: Pieces, name: str) -> models.Model:
    trainer, entries = pieces.model.trainer_spec, pieces.model.pieces
    if trainer.model_type == UNIGRAM:
        vocabulary = [(entry.piece, entry.score) for entry in entries]
        return models.Unigram(vocabulary, pieces.processor.unk_id(), trainer.byte_fallback)
    if trainer.model_type != BPE:
        raise UserError(f"the tokenizer.model of {name} is neither BPE nor unigram; take the published one")
    normal = {
        entry.piece: (-entry.score, number) for number, entry in enumerate(entries) if entry.type == NORMAL
    }
    # sentencepiece joins whichever neighbours make the best-scored piece: every way to make one is a merge.
    merges = [
        (rank, piece[:cut], piece[cut:])
        for piece, rank in normal.items()
        for cut in range(1, len(piece))
        if piece[:cut] in normal and piece[cut:] in normal
    ]
    return models.BPE(
        vocab={entry.piece: number for number, entry in enumerate(entries)},
        merges=[(left, right) for _, left, right in sorted(merges)],
        unk_token=pieces.unk,
        fuse_unk=True,
        byte_fallback=trainer.byte_fallback,
        # A user-defined piece is cut out whole below; no merge makes it.
        ignore_merges=any(entry.type == USER_DEFINED for entry in entries),
    )


def _text_steps(tokenizer: Tokenizer, pieces: Pieces) -> None:
    """What sentencepiece does to a text before it looks for pieces, in its order, and to pieces on the way back."""
    spec = pieces.model.normalizer_spec
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [
            normalizers.Replace(Regex(r"\A +| +\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    if spec.escape_whitespaces:
        steps.append(normalizers.Replace(" ", SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    whole = [entry.piece for entry in pieces.model.pieces if entry.type == USER_DEFINED]
    if whole:
        pattern = "|".join(re.escape(piece) for piece in sorted(whole, key=len, reverse=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    back: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if spec.add_dummy_prefix:
        back.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(back)
