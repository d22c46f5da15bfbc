"""Converted tokenizers give the published ids, and their templates the published prompts."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import sentencepiece

from tasks.data.rows import Row
from tasks.data.templates import encode, load_tokenizer
from tasks.errors import UserError
from tasks.params import ModelParams
from tasks.paths import Paths
from tasks.trainer.base_model import ensure_base
from tasks.trainer.legacy.sentencepiece_file import Pieces, from_sentencepiece
from tasks.trainer.legacy.tiktoken_file import read_ranks
from tests.unit import legacy_cases

TEXTS = ("hello  there, the cat\n\nsat", " 你好，今天 很好 12345", "rare 🦜 ąę\t", "<reserved_7> in a text")


def converted(kind: str, tmp_path: Path) -> tuple[object, Path]:
    folder = legacy_cases.write(tmp_path / "model", kind)
    paths = Paths(tmp_path / "w")
    ensure_base(ModelParams(name_or_path=str(folder), revision=None, trust_remote_code=False), paths)
    return load_tokenizer(paths.base, "m", False), folder


def pieces_of(folder: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


TALK = (("user", "hello the cat"), ("assistant", "你好"), ("user", "12"), ("assistant", "the mat"))


def learnt(encoded: object) -> list[int]:
    return [label for label in encoded.labels if label != -100]


@pytest.mark.parametrize("kind", ["baichuan", "baichuan2", "chatglm2", "chatglm3"])
def test_sentencepiece_ids_and_text(kind: str, tmp_path: Path) -> None:
    fast, folder = converted(kind, tmp_path)
    old = pieces_of(folder)
    for text in TEXTS:
        ids = fast(text, add_special_tokens=False).input_ids
        assert ids == old.encode(text)
        assert fast.decode(ids) == old.decode(ids) == text


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("dummy_prefix", [True, False])
def test_both_kinds_of_sentencepiece(kind: str, dummy_prefix: bool, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.model"
    legacy_cases.write_sentencepiece(file, dummy_prefix, kind)
    fast = from_sentencepiece(Pieces.read(file, "m"), "m")
    old = pieces_of(tmp_path)
    for text in TEXTS:
        assert fast(text).input_ids == old.encode(text)


def test_chatglm3_prompt_is_the_published_one(tmp_path: Path) -> None:
    fast, folder = converted("chatglm3", tmp_path)
    old = pieces_of(folder)
    marks = old.get_piece_size()
    gmask, sop, user, assistant = marks + 1, marks + 3, marks + 6, marks + 7
    # The published code joins a role's number, the ids of "\n" and the ids of what is said, each made alone.
    turn = [user, *old.encode("\n"), *old.encode("hello the cat")]
    opened = fast.apply_chat_template(
        [{"role": "user", "content": "hello the cat"}], add_generation_prompt=True
    )
    assert opened.input_ids == [gmask, sop, *turn, assistant]
    row = encode(fast, Row(TALK[:2], "r", "r"), 100)
    answer = [*old.encode("\n"), *old.encode("你好"), old.eos_id()]
    assert row.input_ids == [*opened.input_ids, *answer] and learnt(row) == answer
    assert len(learnt(encode(fast, Row(TALK, "r", "r"), 200))) > len(answer)
    assert fast("the sop of a popsop", add_special_tokens=False).input_ids == old.encode(
        "the sop of a popsop"
    )
    ends = json.loads((tmp_path / "w" / "data" / "base" / "generation_config.json").read_text())[
        "eos_token_id"
    ]
    assert ends == [old.eos_id(), user, marks + 8]


def test_chatglm2_prompt_is_the_published_one(tmp_path: Path) -> None:
    fast, folder = converted("chatglm2", tmp_path)
    old = pieces_of(folder)
    start = [old.get_piece_size() + 1, old.get_piece_size() + 3]
    opened = fast.apply_chat_template([{"role": "user", "content": "你好吗"}], add_generation_prompt=True)
    assert opened.input_ids == [*start, *old.encode("[Round 1]\n\n问：你好吗\n\n答：")]
    assert fast("x").input_ids[:2] == start
    text = fast.apply_chat_template([{"role": r, "content": c} for r, c in TALK], tokenize=False)
    assert text == (
        "[gMASK]<sop>[Round 1]\n\n问：hello the cat\n\n答：你好</s>\n\n[Round 2]\n\n问：12\n\n答：the mat</s>"
    )
    assert learnt(encode(fast, Row(TALK[:2], "r", "r"), 200))[-1] == old.eos_id()


@pytest.mark.parametrize("kind", ["baichuan", "baichuan2"])
def test_baichuan_turns_are_opened_by_195_and_196(kind: str, tmp_path: Path) -> None:
    fast, folder = converted(kind, tmp_path)
    old = pieces_of(folder)
    row = encode(fast, Row((("system", "the hat"), *TALK), "r", "r"), 200)
    said = [old.encode(text) for _, text in TALK]
    assert row.input_ids == [
        *([1] if kind == "baichuan" else []),
        *old.encode("the hat"),
        *(195, *said[0], 196, *said[1], old.eos_id()),
        *(195, *said[2], 196, *said[3], old.eos_id()),
    ]
    assert learnt(row) == [*said[1], old.eos_id(), *said[3], old.eos_id()]
    assert fast("x").input_ids[0] == (1 if kind == "baichuan" else old.encode("x")[0])


def test_qwen_ids_and_prompt(tmp_path: Path) -> None:
    fast, folder = converted("qwen", tmp_path)
    ranks = read_ranks(folder / "qwen.tiktoken")
    numbers = {token.decode("latin-1"): rank for token, rank in ranks.items()}
    start, stop = len(ranks) + 1, len(ranks) + 2
    assert fast.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|extra_204|>"]) == [
        len(ranks),
        start,
        stop,
        len(ranks) + 207,
    ]
    # By hand: " the" is joined whole, "then" is the, n; 你 is one token of three bytes; composed before it is cut.
    ids = fast("in the then 你e\u0301").input_ids
    assert ids == [
        numbers["in"],
        numbers[" the"],
        numbers[" the"],
        ord("n"),
        ord(" "),
        numbers["\xe4\xbd\xa0"],
        0xC3,
        0xA9,
    ]
    opened = fast.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert opened == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    row = encode(fast, Row((("user", "hi"), ("assistant", "the")), "r", "r"), 200)
    assert learnt(row) == [numbers["the"], stop]
    assert (fast.eos_token_id, fast.pad_token_id) == (stop, len(ranks))


# --- refusals -----------------------------------------------------------------------------------


def refusal(folder: Path, tmp_path: Path) -> str:
    with pytest.raises(UserError) as caught:
        ensure_base(
            ModelParams(name_or_path=str(folder), revision=None, trust_remote_code=False),
            Paths(tmp_path / "w"),
        )
    assert not Paths(tmp_path / "w").base.exists()
    return str(caught.value)


def test_tokenizers_that_are_not_what_they_should_be(tmp_path: Path) -> None:
    folder = legacy_cases.write(tmp_path / "a", "chatglm3")
    legacy_cases.write_tiktoken(folder / "tokenizer.model")
    assert "tokenizer.model is no sentencepiece model" in refusal(folder, tmp_path)
    (folder / "tokenizer.model").unlink()
    assert "has no tokenizer.model, its tokenizer" in refusal(folder, tmp_path)
    folder = legacy_cases.write(tmp_path / "b", "qwen")
    (folder / "qwen.tiktoken").write_text(base64.b64encode(b"a").decode() + " 5\n")
    assert "has gaps in its ranks or lacks a byte" in refusal(folder, tmp_path)
    (folder / "qwen.tiktoken").write_text("no base64\n")
    assert "is no tiktoken file" in refusal(folder, tmp_path)
    folder = legacy_cases.write(tmp_path / "c", "baichuan")
    (folder / "generation_config.json").write_text(json.dumps({"user_token_id": 90000}))
    assert "token 90000 is none of the" in refusal(folder, tmp_path)


def test_a_tokenizer_that_encodes_otherwise_is_refused(tmp_path: Path) -> None:
    """A piece's score is changed in one of the two: they then join other neighbours first."""
    file = tmp_path / "tokenizer.model"
    legacy_cases.write_sentencepiece(file)
    pieces = Pieces.read(file, "m")
    normal = [piece for piece in pieces.model.pieces if piece.type == 1 and len(piece.piece) > 1]
    for place, piece in enumerate(normal):
        piece.score = float(place)
    with pytest.raises(UserError, match="the tokenizer of m cannot be converted exactly"):
        from_sentencepiece(pieces, "m")
