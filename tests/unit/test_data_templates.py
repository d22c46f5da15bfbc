"""Masks and begin tokens under templates of other kinds than ChatML; tokenizers that cannot serve."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tasks.data.prompts import PROMPTS
from tasks.data.rendering import Template
from tasks.data.rows import BadRow, Row
from tasks.data.templates import Encoded, Encoder, encode, load_tokenizer
from tasks.errors import UserError
from tests import tiny

WITH_BEGIN = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %} {{ message['content'] }}"
    "{{ eos_token }}{% else %}[{{ message['content'] }}]{% endif %}{% endfor %}"
)
# As of models that think: earlier thoughts are left out.
FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PICKY = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + tiny.CHATML
)
DEAF = "{% for message in messages if message['role'] != 'system' %}" + tiny.CHATML.partition("%}")[2]
MARKED = tiny.CHATML.replace(
    "{{ message['content'] }}",
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}",
)
PLAIN = "{% for message in messages %}{{ message['role'] }} : {{ message['content'] }} {% endfor %}"
CLOCKED = "<|im_start|>{{ strftime_now('%d %b %Y') }}<|im_end|>\n" + tiny.CHATML
IN_PARTS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{{ part['text'] }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = "{{ tools | tojson if tools else '' }}" + tiny.CHATML.replace(
    "{{ message['content'] }}",
    "{{ message['tool_calls'] | tojson if message['tool_calls'] else message['content'] }}",
)
TALK = Row((("user", "one"), ("assistant", "1"), ("user", "two"), ("assistant", "2")), "g", "w")


@pytest.fixture
def tokenizer(tmp_path: Path) -> PreTrainedTokenizerFast:
    tiny.write_tokenizer(tmp_path)
    return AutoTokenizer.from_pretrained(tmp_path)


def adds_begin_token(tokenizer: PreTrainedTokenizerFast) -> None:
    """Makes the tokenizer put <|im_start|> before every text, as Llama's does with its own."""
    from tokenizers.processors import TemplateProcessing

    begin = tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", begin)]
    )
    assert tokenizer("x")["input_ids"][0] == begin


def test_there_is_one_begin_token_where_template_and_tokenizer_both_add_one(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    adds_begin_token(tokenizer)
    tokenizer.chat_template = WITH_BEGIN
    found = encode(tokenizer, TALK, 100)
    assert tokenizer.decode(found.input_ids) == "<|im_start|>[one] 1<|im_end|>[two] 2<|im_end|>"
    assert found.input_ids.count(tokenizer.bos_token_id) == 1
    learnt = tokenizer.decode([label for label in found.labels if label != -100])
    assert learnt == " 1<|im_end|> 2<|im_end|>"


def run(
    tokenizer: PreTrainedTokenizerFast,
    row: Row,
    template: str | None = None,
    length: int = 400,
    learn: str = "answers",
) -> tuple[str, str]:
    """(the whole text, what is learnt of it)."""
    found = Encoder(tokenizer, template, length, learn).encode([row])[0]
    if isinstance(found, BadRow):
        raise found
    return texts(tokenizer, found)


def texts(tokenizer: PreTrainedTokenizerFast, found: Encoded) -> tuple[str, str]:
    ids, labels = list(found.input_ids), list(found.labels)
    assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
    return tokenizer.decode(ids), tokenizer.decode([label for label in labels if label != -100])


def test_what_is_learnt(tokenizer: PreTrainedTokenizerFast) -> None:
    whole, learnt = run(tokenizer, TALK)
    assert learnt == "1<|im_end|>2<|im_end|>"
    assert run(tokenizer, TALK, learn="last") == (whole, "2<|im_end|>")
    assert run(tokenizer, TALK, learn="all") == (whole, whole)
    assert run(tokenizer, TALK, MARKED) == (whole, learnt), (
        "the end mark is learnt where the marks leave it out"
    )
    assert run(tokenizer, TALK, MARKED, learn="last")[1] == "2<|im_end|>"


def test_answers_that_are_only_read_are_not_learnt(tokenizer: PreTrainedTokenizerFast) -> None:
    whole = Encoder(tokenizer, tiny.CHATML, 100, "answers").encode([TALK])[0]
    read = [Row(TALK.messages, "g", "w", unlearnt=turns) for turns in ((1,), (3,))]
    first, second = Encoder(tokenizer, tiny.CHATML, 100, "answers").encode(read)
    assert isinstance(whole, Encoded) and isinstance(first, Encoded) and isinstance(second, Encoded)
    learnt = [np.asarray(one.labels) != -100 for one in (whole, first, second)]
    assert learnt[1].any() and learnt[2].any() and not (learnt[1] & learnt[2]).any()
    assert ((learnt[1] | learnt[2])[: len(learnt[0])] == learnt[0]).all()
    assert len({row.id for row in (TALK, *read)}) == 3
    last = Encoder(tokenizer, tiny.CHATML, 100, "last").encode(read)
    assert isinstance(last[0], Encoded) and isinstance(last[1], BadRow)
    assert all(isinstance(one, BadRow) for one in Encoder(tokenizer, tiny.CHATML, 100, "all").encode(read))
    pieces = list(Encoder(tokenizer, FORGETFUL, 100, "answers").pieces(read[0]))
    assert [len(piece.messages) for piece in pieces] == [4]


def test_a_template_that_rewrites_earlier_turns_is_refused_or_learnt_an_answer_at_a_time(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    with pytest.raises(BadRow, match="differently from its beginning"):
        run(tokenizer, TALK, FORGETFUL)
    encoder = Encoder(tokenizer, FORGETFUL, 400, "answers")
    pieces = list(encoder.pieces(TALK))
    assert [piece.messages for piece in pieces] == [TALK.messages[:2], TALK.messages]
    assert len({piece.id for piece in pieces}) == 2
    found = [texts(tokenizer, one) for one in encoder.encode(pieces)]
    assert [learnt for _, learnt in found] == ["<think></think>1<|im_end|>", "<think></think>2<|im_end|>"]
    assert run(tokenizer, TALK, FORGETFUL, learn="last") == found[1]
    assert list(Encoder(tokenizer, None, 400, "answers").pieces(TALK)) == [TALK]


def test_what_the_template_refuses_or_leaves_out_is_a_bad_row(tokenizer: PreTrainedTokenizerFast) -> None:
    asked = Row((("system", "S"), *TALK.messages), "g", "w")
    with pytest.raises(BadRow, match=r"refuses it \(no system here"):
        run(tokenizer, asked, PICKY)
    with pytest.raises(BadRow, match="leaves the system turn out"):
        run(tokenizer, asked, DEAF)
    assert "2<|im_end|>" in run(tokenizer, TALK, DEAF)[1]
    with pytest.raises(
        BadRow, match=r"assistant turn holds <\|im_end\|>, which the chat template writes itself"
    ):
        run(tokenizer, Row((("user", "x"), ("assistant", "y<|im_end|>")), "g", "w"))
    with pytest.raises(
        UserError, match="no question with its answer can be written: the chat template refuses it"
    ):
        run(tokenizer, TALK, "{{ raise_exception('nobody') }}")


def test_one_bad_row_spoils_no_other(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [TALK, Row((("system", "S"), *TALK.messages), "g", "w"), TALK]
    found = Encoder(tokenizer, PICKY, 400, "answers").encode(rows)
    assert [type(one) for one in found] == [Encoded, BadRow, Encoded]


def test_tools_and_calls_are_written_or_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    call = '[{"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}]'
    messages = (("user", "rain?"), ("assistant", ""), ("tool", "none"), ("assistant", "no"))
    tools = '[{"type": "function", "function": {"name": "look"}}]'
    row = Row(messages, "g", "w", tools=tools, calls=((1, call),))
    whole, learnt = run(tokenizer, row, TOOLS)
    assert (
        whole.startswith(tools)
        and '"name": "look", "arguments"' in learnt
        and learnt.endswith("no<|im_end|>")
    )
    with pytest.raises(BadRow, match="leaves the tools out"):
        run(tokenizer, row)
    with pytest.raises(BadRow, match="leaves a tool's call out"):
        run(tokenizer, row, "{{ tools | tojson if tools else '' }}" + tiny.CHATML)


def test_d10_a_plain_template_without_marks_over_words() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<unk>", "</s>", "user", "assistant", ":", "one", "two", "1", "2"]
    backend = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")
    found = Encoder(tokenizer, PLAIN, 40, "answers").encode([TALK])[0]
    assert texts(tokenizer, found)[1] == "assistant : 1 assistant : 2 </s>"


def test_d8_rows_without_a_target_within_the_length_are_bad(tokenizer: PreTrainedTokenizerFast) -> None:
    row = Row((("user", "q" * 100), ("assistant", "a" * 5)), "g", "w", "completion")
    with pytest.raises(BadRow, match="no answer token within max_length=24"):
        run(tokenizer, row, length=24)


def test_d11_the_begin_token_is_put_once(tokenizer: PreTrainedTokenizerFast) -> None:
    adds_begin_token(tokenizer)
    for template in (WITH_BEGIN, WITH_BEGIN.removeprefix("{{ bos_token }}")):
        found = Encoder(tokenizer, template, 100, "answers").encode([TALK])[0]
        assert list(found.input_ids).count(tokenizer.bos_token_id) == 1
        whole = tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in TALK.messages], chat_template=WITH_BEGIN
        )
        assert list(found.input_ids) == whole["input_ids"]
    text = Row((("assistant", "x"),), "g", "w", "text")
    assert run(tokenizer, text)[0] == "<|im_start|>x<|im_end|>"
    assert (
        run(tokenizer, Row((("assistant", "<|im_start|>x"),), "g", "w", "text"))[0]
        == "<|im_start|>x<|im_end|>"
    )


def test_completions_and_texts_have_no_template(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = None
    row = Row((("user", "2+2="), ("assistant", "4 ü")), "g", "w", "completion")
    assert run(tokenizer, row) == ("2+2=4 ü<|im_end|>", "4 ü<|im_end|>")
    assert run(tokenizer, row, learn="all")[1] == "2+2=4 ü<|im_end|>"
    with pytest.raises(UserError, match=r"no chat template .*set prepare_data\.template"):
        run(tokenizer, TALK)
    text = "Ein Text, 你好 🦜, länger als erlaubt.\n" * 9
    encoder = Encoder(tokenizer, None, 40, "answers")
    pieces = list(encoder.pieces(Row((("assistant", text),), "g", "w", "text")))
    assert "".join(piece.answer for piece in pieces) == text and len({piece.id for piece in pieces}) == len(
        pieces
    )
    found = encoder.encode(pieces)
    assert not any(one.truncated for one in found) and max(len(one.input_ids) for one in found) <= 40
    assert [texts(tokenizer, one)[1].endswith("<|im_end|>") for one in found] == [False] * (
        len(pieces) - 1
    ) + [True]


def test_no_token_reaches_from_a_question_into_its_completion() -> None:
    tokenizer = merging(["in the the"])
    joined = tokenizer("in the", add_special_tokens=False)["input_ids"]
    row = Row((("user", "in t"), ("assistant", "he")), "g", "w", "completion")
    found = Encoder(tokenizer, None, 40, "answers").encode([row])[0]
    assert texts(tokenizer, found) == ("in the<|im_end|>", "he<|im_end|>")
    assert len(found.input_ids) - 1 > len(joined)


def test_cutting_halves_no_character_and_keeps_no_question_without_answer(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    row = Row((("user", "q"), ("assistant", "你好吗")), "g", "w")
    whole = len(Encoder(tokenizer, None, 99, "answers").encode([row])[0].input_ids)
    for length in range(whole - 7, whole - 1):
        found = Encoder(tokenizer, None, length, "answers").encode([row])[0]
        assert found.truncated and "\ufffd" not in texts(tokenizer, found)[0]
    long = Row((*TALK.messages[:2], ("user", "z" * 99), *TALK.messages[3:]), "g", "w")
    found = Encoder(tokenizer, None, 50, "answers").encode([long])[0]
    assert found.truncated and texts(tokenizer, found)[0].endswith("1<|im_end|>")


def test_a_clock_stands_still_and_parts_are_made(tokenizer: PreTrainedTokenizerFast) -> None:
    assert run(tokenizer, TALK, CLOCKED)[0].startswith("<|im_start|>26 Jul 2024<|im_end|>")
    assert run(tokenizer, TALK, IN_PARTS) == run(tokenizer, TALK)


class Slow:
    """A tokenizer that tells no offsets."""

    is_fast = False

    def __init__(self, inner: PreTrainedTokenizerFast) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": self._inner(text, add_special_tokens=add_special_tokens)["input_ids"]}


def test_a_tokenizer_without_offsets_gives_the_same(tokenizer: PreTrainedTokenizerFast) -> None:
    for kind in (tokenizer, merging(["one two three 1 2 assistant"])):
        kind.chat_template = tiny.CHATML
        for row in (TALK, Row((("user", "in t"), ("assistant", "he ü")), "g", "w", "completion")):
            assert run(Slow(kind), row) == run(kind, row)


def merging(words: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that joins what it often saw."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=tiny.SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator(words * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<|im_end|>")


def test_ids_are_those_of_the_whole_text_where_words_merge() -> None:
    """A tokenizer with merges, so that a turn's borders may fall inside what one turn alone would merge."""
    tokenizer = merging(["user one two three assistant one two three ü"])
    tokenizer.chat_template = tiny.CHATML
    talk = Row(
        (("user", "one two"), ("assistant", "two three ü"), ("user", "ü"), ("assistant", "one")), "g", "w"
    )
    found = encode(tokenizer, talk, 100)
    turns = [{"role": role, "content": content} for role, content in talk.messages]
    whole = tokenizer.apply_chat_template(turns, tokenize=False)
    assert found.input_ids == tokenizer(whole)["input_ids"]
    assert len(found.input_ids) < len(whole)
    learnt = tokenizer.decode([label for label in found.labels if label != -100])
    assert learnt == "two three ü<|im_end|>one<|im_end|>"


@pytest.mark.parametrize(
    "template",
    [*(prompt.text for prompt in PROMPTS.values()), tiny.CHATML, WITH_BEGIN, FORGETFUL, MARKED, PLAIN],
)
def test_many_conversations_are_written_as_apply_chat_template_writes_each(
    tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    asked = Row((("system", '<s> & "you"'), *TALK.messages), "g", "w")
    chats = [row.chat for row in (TALK, asked, TALK)]
    try:
        expected = tokenizer.apply_chat_template(chats, chat_template=template, tokenize=False)
    except TemplateError as error:
        with pytest.raises(BadRow) as refused:
            Template(tokenizer, template).render_all(chats)
        assert str(error) in refused.value.reason
    else:
        assert Template(tokenizer, template).render_all(chats) == expected


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(
        UserError, match=r"name_or_path=mine has no tokenizer that can be loaded .*beside its"
    ):
        load_tokenizer(tmp_path, "mine", False)
