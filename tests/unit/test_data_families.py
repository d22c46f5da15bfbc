"""Each family's documented prompt: ids and labels of two rounds, tokenised piece by piece another way.

The pieces are written out by hand from the published prompts. Byte-level families are encoded from the bytes'
numbers, the others by sentencepiece itself, as the published code does it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tasks.data.choice import choose
from tasks.data.rows import Row
from tasks.data.templates import Encoder
from tasks.errors import UserError
from tasks.trainer.legacy.sentencepiece_file import Pieces, from_sentencepiece
from tests.unit import legacy_cases

SYSTEM, ONE, FIRST, TWO, SECOND = "the hat", "hello the cat", "12 天气", "你好", "the mat"
TALK = Row(
    (("system", SYSTEM), ("user", ONE), ("assistant", FIRST), ("user", TWO), ("assistant", SECOND)), "g", "w"
)
BARE = Row(TALK.messages[1:], "g", "w")
ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. "
)
Expected = list[tuple[list[int], bool]]  # (ids, learnt)


def encoded(
    tokenizer: PreTrainedTokenizerFast, kind: str, root: Path, row: Row, name: str = "m"
) -> tuple[str, list[int], list[int]]:
    """(the prompt's name, ids, labels) under `template: auto`."""
    (root / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    choice = choose("auto", tokenizer, root, name, root)
    assert choice is not None
    found = Encoder(tokenizer, choice.text, 500, "answers").encode([row])[0]
    return choice.name, found.input_ids.tolist(), found.labels.tolist()


def check(found: tuple[str, list[int], list[int]], name: str, expected: Expected) -> None:
    assert found[0] == name
    assert found[1] == [token for ids, _ in expected for token in ids]
    assert found[2] == [token if learnt else -100 for ids, learnt in expected for token in ids]


# --- byte-level families ------------------------------------------------------------------------


def bytewise(special: list[str], begin: str = "", end: str = "") -> PreTrainedTokenizerFast:
    """One token a byte, numbered by the byte; special tokens behind."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    rest = [byte for byte in range(256) if byte not in letters]
    letters |= {byte: chr(256 + place) for place, byte in enumerate(rest)}
    tokenizer = Tokenizer(models.BPE({letters[byte]: byte for byte in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    if begin:
        ids = [(token, tokenizer.token_to_id(token)) for token in begin.split()]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=ids)
    bos = {"bos_token": begin} if begin in special else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end or special[-1], **bos)


def writer(special: list[str]) -> Callable[[str], list[int]]:
    """Ids of a text that is a special token or has none."""
    return lambda text: [256 + special.index(text)] if text in special else list(text.encode())


def test_llama3(tmp_path: Path) -> None:
    special = [
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|end_of_text|>",
    ]
    ids = writer(special)
    begin, start, stop, eot, _ = special

    def header(role: str) -> Expected:
        return [(ids(start), False), (ids(role), False), (ids(stop), False), (ids("\n\n"), False)]

    expected: Expected = [(ids(begin), False)]
    for role, content in TALK.messages:
        learnt = role == "assistant"
        expected += [*header(role), (ids(content), learnt), (ids(eot), learnt)]
    tokenizer = bytewise(special, begin, special[-1])
    check(encoded(tokenizer, "llama", tmp_path, TALK), "llama3", expected)


def test_qwen(tmp_path: Path) -> None:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    ids = writer(special)
    _, start, stop = special
    expected: Expected = []
    for role, content in (("system", "You are a helpful assistant."), *BARE.messages):
        learnt = role == "assistant"
        expected += [
            (ids(start), False),
            (ids(f"{role}\n"), False),
            (ids(content), learnt),
            (ids(stop), learnt),
        ]
        expected += [(ids("\n"), False)]
    tokenizer = bytewise(special, end="<|endoftext|>")
    check(encoded(tokenizer, "qwen2", tmp_path, BARE), "qwen", expected)
    assert encoded(tokenizer, "another", tmp_path, TALK)[0] == "chatml"


def test_bloom_by_alpacas_prompt(tmp_path: Path) -> None:
    ids = writer(["<s>", "</s>"])
    expected: Expected = [
        (ids(f"{ALPACA}### Instruction:\n{ONE}\n\n### Response:\n"), False),
        (ids(FIRST), True),
        (ids("</s>"), True),
        (ids(f"\n\n### Instruction:\n{TWO}\n\n### Response:\n"), False),
        (ids(SECOND), True),
        (ids("</s>"), True),
    ]
    check(encoded(bytewise(["<s>", "</s>"]), "bloom", tmp_path, BARE), "alpaca", expected)


def test_glm4_where_the_next_turn_ends_an_answer(tmp_path: Path) -> None:
    special = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|endoftext|>"]
    ids = writer(special)
    gmask, sop, system, user, assistant, end = special
    expected: Expected = [
        (ids(token), False) for token in (gmask, sop, system, f"\n{SYSTEM}", user, f"\n{ONE}")
    ]
    expected += [(ids(assistant), False), (ids(f"\n{FIRST}"), True), (ids(user), True)]
    expected += [
        (ids(f"\n{TWO}"), False),
        (ids(assistant), False),
        (ids(f"\n{SECOND}"), True),
        (ids(end), True),
    ]
    tokenizer = bytewise(special, "[gMASK] <sop>", end)
    check(encoded(tokenizer, "glm", tmp_path, TALK), "glm4", expected)


# --- sentencepiece families ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Pieces:
    file = tmp_path_factory.mktemp("pieces") / "tokenizer.model"
    legacy_cases.write_sentencepiece(file)
    return Pieces.read(file, "m")


def split(old: SentencePieceProcessor, before: str, answer: str) -> Expected:
    """One text, whose end is learnt."""
    whole, first = old.encode(before + answer), old.encode(before)
    assert whole[: len(first)] == first
    return [(first, False), (whole[len(first) :], True)]


def test_llama2(pieces: Pieces, tmp_path: Path) -> None:
    """As in chat_completion: every round is a text of its own with begin and end token."""
    old = pieces.processor
    expected: Expected = []
    for question, answer in ((f"<<SYS>>\n{SYSTEM}\n<</SYS>>\n\n{ONE}", FIRST), (TWO, SECOND)):
        expected += [([old.bos_id()], False), *split(old, f"[INST] {question} [/INST]", f" {answer} ")]
        expected += [([old.eos_id()], True)]
    tokenizer = from_sentencepiece(pieces, "m", begin=[pieces.bos])
    check(encoded(tokenizer, "llama", tmp_path, TALK), "llama2", expected)


def test_mistral(pieces: Pieces, tmp_path: Path) -> None:
    """As in mistral_common: the begin token once, questions and answers encoded apart."""
    old = pieces.processor
    expected: Expected = [([old.bos_id()], False)]
    for question, answer in ((f"{SYSTEM}\n\n{ONE}", FIRST), (TWO, SECOND)):
        expected += [(old.encode(f"[INST] {question} [/INST]"), False), (old.encode(answer), True)]
        expected += [([old.eos_id()], True)]
    tokenizer = from_sentencepiece(pieces, "m", begin=[pieces.bos])
    check(encoded(tokenizer, "mistral", tmp_path, TALK), "mistral", expected)


@pytest.mark.parametrize(("kind", "name"), [("llava", "m"), ("llama", "lmsys/vicuna-7b")])
def test_vicuna_and_llava(pieces: Pieces, tmp_path: Path, kind: str, name: str) -> None:
    old = pieces.processor
    expected: Expected = [([old.bos_id()], False)]
    expected += [*split(old, f"{VICUNA}USER: {ONE} ASSISTANT:", f" {FIRST}"), ([old.eos_id()], True)]
    expected += [*split(old, f"USER: {TWO} ASSISTANT:", f" {SECOND}"), ([old.eos_id()], True)]
    tokenizer = from_sentencepiece(pieces, "m", begin=[pieces.bos])
    check(encoded(tokenizer, kind, tmp_path, BARE, name), "vicuna", expected)


def test_baichuan(pieces: Pieces, tmp_path: Path) -> None:
    old = pieces.processor
    roles = [pieces.text(195, "m"), pieces.text(196, "m")]
    tokenizer = from_sentencepiece(pieces, "m", special=[*roles, "<reserved_102>", "<reserved_103>"])
    user, assistant = (old.piece_to_id(f"<reserved_{number}>") for number in (102, 103))
    expected: Expected = [(old.encode(SYSTEM), False)]
    for question, answer in ((ONE, FIRST), (TWO, SECOND)):
        expected += [([user], False), (old.encode(question), False), ([assistant], False)]
        expected += [(old.encode(answer), True), ([old.eos_id()], True)]
    check(encoded(tokenizer, "baichuan", tmp_path, TALK), "baichuan", expected)


def test_chatglm3(pieces: Pieces, tmp_path: Path) -> None:
    """As in build_single_message: a role's token, a line's end, what is said, each encoded apart."""
    old = pieces.processor
    marks = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"]
    tokenizer = from_sentencepiece(pieces, "m", added=marks, begin=marks[:2])
    number = {mark: old.get_piece_size() + place for place, mark in enumerate(marks)}
    expected: Expected = [([number["[gMASK]"], number["<sop>"]], False)]
    for role, content in TALK.messages:
        learnt = role == "assistant"
        expected += [
            ([number[f"<|{role}|>"]], False),
            (old.encode("\n"), learnt),
            (old.encode(content), learnt),
        ]
        expected += [([old.eos_id()], True)] if learnt else []
    check(encoded(tokenizer, "chatglm", tmp_path, TALK), "chatglm3", expected)


def test_a_prompt_whose_tokens_are_missing_is_refused(pieces: Pieces, tmp_path: Path) -> None:
    tokenizer = from_sentencepiece(pieces, "m")
    with pytest.raises(
        UserError, match=r"llama3 \(params.yaml says so\) needs <\|start_header_id\|>.* lacks; set"
    ):
        choose("llama3", tokenizer, tmp_path, "m", tmp_path)
    with pytest.raises(
        UserError, match=r"template=lama2 is unknown; use auto, a .jinja file, or llama2, llama3"
    ):
        choose("lama2", tokenizer, tmp_path, "m", tmp_path)
    assert choose("auto", tokenizer, tmp_path, "m", tmp_path) is None
