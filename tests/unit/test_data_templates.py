"""Masks and begin tokens under templates of other kinds than ChatML; tokenizers that cannot serve."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tasks.data.rows import BadRow, Row
from tasks.data.templates import encode, load_tokenizer
from tasks.errors import UserError
from tests import tiny

WITH_BEGIN = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %} {{ message['content'] }}"
    "{{ eos_token }}{% else %}[{{ message['content'] }}]{% endif %}{% endfor %}"
)
FORGETFUL = (
    "{% for message in messages %}{% if message['role'] != 'assistant' or loop.last %}"
    "<|im_start|>{{ message['content'] }}<|im_end|>{% endif %}{% endfor %}"
)
PICKY = "{{ raise_exception('only users speak here') }}"
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


def test_a_template_that_rewrites_earlier_turns_is_refused_for_them_only(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer.chat_template = FORGETFUL
    with pytest.raises(BadRow, match="differently from its beginning"):
        encode(tokenizer, TALK, 100)
    single = encode(tokenizer, Row(TALK.messages[:2], "g", "w"), 100)
    assert any(label != -100 for label in single.labels)


def test_what_the_template_refuses_is_a_bad_row(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = PICKY
    with pytest.raises(BadRow, match=r"refuses it \(only users speak here"):
        encode(tokenizer, TALK, 100)


def test_ids_are_those_of_the_whole_text_where_words_merge(tmp_path: Path) -> None:
    """A tokenizer with merges, so that a turn's borders may fall inside what one turn alone would merge."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        ["user one two three assistant one two three ü"] * 20,
        trainers.BpeTrainer(vocab_size=320, special_tokens=tiny.SPECIALS, initial_alphabet=alphabet),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<|im_end|>")
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


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(
        UserError, match=r"name_or_path=mine has no tokenizer that can be loaded .*beside its"
    ):
        load_tokenizer(tmp_path, "mine", False)
