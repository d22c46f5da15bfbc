"""The documented prompts of the model families, for tokenizers that come without a chat template."""

from __future__ import annotations

from dataclasses import dataclass

OWN = "the tokenizer's own"
JINJA = (".jinja", ".jinja2")
ROUND = "message['role'] == 'user'"
ANSWER = "message['role'] == 'assistant'"


@dataclass(frozen=True)
class Prompt:
    """One documented prompt. `needs`: tokens that must be in the vocabulary; `source`: where it is published."""

    text: str
    needs: tuple[str, ...]
    source: str


def _refuse(name: str) -> str:
    return f"{{{{ raise_exception('{name} knows system, user and assistant alone') }}}}"


def _system_apart(first: str) -> str:
    """Takes a system turn out of the conversation; `first` is what the first question then begins with."""
    return (
        "{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' -%}"
        "{%- for message in (messages[1:] if system else messages) -%}"
        f"{{%- set system_part = {first} if system and loop.first else '' -%}}"
    )


def _llama2() -> str:
    return (
        _system_apart("'<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n'")
        + f"{{%- if {ROUND} -%}}"
        + "{{ bos_token + '[INST] ' + system_part + message['content'] | trim + ' [/INST]' }}"
        + f"{{%- elif {ANSWER} -%}}{{{{ ' ' + message['content'] | trim + ' ' + eos_token }}}}"
        + f"{{%- else -%}}{_refuse('Llama 2')}{{%- endif -%}}{{%- endfor -%}}"
    )


def _llama3() -> str:
    return (
        "{{- bos_token -}}{%- for message in messages -%}"
        "{%- if message['role'] in ('system', 'user', 'assistant') -%}"
        "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' -}}"
        "{{- message['content'] | trim + '<|eot_id|>' -}}"
        f"{{%- else -%}}{_refuse('this Llama 3 prompt')}{{%- endif -%}}{{%- endfor -%}}"
        "{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"
    )


def _mistral(opened: str, closed: str, answer: str) -> str:
    """Of three generations, which differ in blanks alone; the system turn goes before the first question."""
    return (
        "{{- bos_token -}}"
        + _system_apart("system + '\\n\\n'")
        + f"{{%- if {ROUND} -%}}{{{{- '{opened}' + system_part + message['content'] + '{closed}' -}}}}"
        + f"{{%- elif {ANSWER} -%}}{{{{- '{answer}' + message['content'] + eos_token -}}}}"
        + f"{{%- else -%}}{_refuse('Mistral')}{{%- endif -%}}{{%- endfor -%}}"
    )


def _chatml(default: str) -> str:
    system = f"<|im_start|>system\\n{default}<|im_end|>\\n"
    return (
        (
            f"{{%- if messages[0]['role'] != 'system' -%}}{{{{- '{system}' -}}}}{{%- endif -%}}"
            if default
            else ""
        )
        + "{%- for message in messages -%}{%- if message['role'] in ('system', 'user', 'assistant') -%}"
        + "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
        + f"{{%- else -%}}{_refuse('this ChatML prompt')}{{%- endif -%}}{{%- endfor -%}}"
        + "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    )


def _alpaca() -> str:
    preamble = (
        "Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request."
    )
    return (
        f"{{%- if messages[0]['role'] != 'system' -%}}{{{{- '{preamble}\\n\\n' -}}}}{{%- endif -%}}"
        "{%- for message in messages -%}"
        "{%- if message['role'] == 'system' -%}{{- message['content'] + '\\n\\n' -}}"
        f"{{%- elif {ROUND} -%}}"
        "{{- '### Instruction:\\n' + message['content'] + '\\n\\n### Response:\\n' -}}"
        f"{{%- elif {ANSWER} -%}}{{{{- message['content'] + eos_token -}}}}"
        "{%- if not loop.last -%}{{- '\\n\\n' -}}{%- endif -%}"
        f"{{%- else -%}}{_refuse('the Alpaca prompt')}{{%- endif -%}}{{%- endfor -%}}"
    )


def _vicuna() -> str:
    system = (
        "A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user\\'s questions."
    )
    return (
        f"{{%- if messages[0]['role'] != 'system' -%}}{{{{- '{system} ' -}}}}{{%- endif -%}}"
        "{%- for message in messages -%}"
        "{%- if message['role'] == 'system' -%}{{- message['content'] + ' ' -}}"
        f"{{%- elif {ROUND} -%}}{{{{- 'USER: ' + message['content'] + ' ' -}}}}"
        f"{{%- elif {ANSWER} -%}}{{{{- 'ASSISTANT: ' + message['content'] + eos_token -}}}}"
        f"{{%- else -%}}{_refuse('Vicuna')}{{%- endif -%}}{{%- endfor -%}}"
        "{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}"
    )


def _baichuan(user: str, assistant: str) -> str:
    return (
        "{%- for message in messages -%}"
        "{%- if message['role'] == 'system' -%}{{- message['content'] -}}"
        f"{{%- elif {ROUND} -%}}{{{{- '{user}' + message['content'] -}}}}"
        f"{{%- elif {ANSWER} -%}}{{{{- '{assistant}' + message['content'] + eos_token -}}}}"
        f"{{%- else -%}}{_refuse('Baichuan')}{{%- endif -%}}{{%- endfor -%}}"
        f"{{%- if add_generation_prompt -%}}{{{{- '{assistant}' -}}}}{{%- endif -%}}"
    )


def _glm(begin: str, line: str, end: str) -> str:
    return (
        f"{{{{- '{begin}' -}}}}{{%- for message in messages -%}}"
        "{%- if message['role'] in ('system', 'user', 'assistant') -%}"
        f"{{{{- '<|' + message['role'] + '|>{line}' + message['content'] -}}}}"
        f"{{%- if {ANSWER} -%}}{{{{- {end} -}}}}{{%- endif -%}}"
        f"{{%- else -%}}{_refuse('this GLM prompt')}{{%- endif -%}}{{%- endfor -%}}"
        "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
    )


MISTRAL = "docs.mistral.ai, tokenization"
PROMPTS: dict[str, Prompt] = {
    "llama2": Prompt(_llama2(), (), "meta-llama/llama, chat_completion"),
    "llama3": Prompt(
        _llama3(), ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "meta-llama/llama3, ChatFormat"
    ),
    "mistral": Prompt(_mistral("[INST] ", " [/INST]", " "), (), f"{MISTRAL} V1"),
    "mistral-v3": Prompt(_mistral("[INST] ", "[/INST]", " "), ("[INST]", "[/INST]"), f"{MISTRAL} V3"),
    "mistral-tekken": Prompt(
        _mistral("[INST]", "[/INST]", ""), ("[INST]", "[/INST]"), f"{MISTRAL} V3-Tekken"
    ),
    "qwen": Prompt(
        _chatml("You are a helpful assistant."), ("<|im_start|>", "<|im_end|>"), "Qwen, make_context"
    ),
    "chatml": Prompt(_chatml(""), ("<|im_start|>", "<|im_end|>"), "OpenAI's ChatML, without a system prompt"),
    "alpaca": Prompt(_alpaca(), (), "tatsu-lab/stanford_alpaca, PROMPT_DICT; rounds as in LLaMA-Factory"),
    "baichuan": Prompt(
        _baichuan("<reserved_102>", "<reserved_103>"),
        ("<reserved_102>", "<reserved_103>"),
        "Baichuan-13B-Chat, user_token_id and assistant_token_id",
    ),
    "baichuan2": Prompt(
        _baichuan("<reserved_106>", "<reserved_107>"),
        ("<reserved_106>", "<reserved_107>"),
        "Baichuan2-7B-Chat, user_token_id and assistant_token_id",
    ),
    "chatglm3": Prompt(
        _glm("[gMASK]<sop>", "\\n ", "eos_token"),
        ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>"),
        "THUDM/ChatGLM3, PROMPT.md",
    ),
    "glm4": Prompt(
        _glm("[gMASK]<sop>", "\\n", "''"),
        ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>"),
        "THUDM/glm-4-9b-chat, chat_template",
    ),
    "vicuna": Prompt(_vicuna(), (), "lm-sys/FastChat, vicuna_v1.1; haotian-liu/LLaVA, conv_vicuna_v1"),
}
