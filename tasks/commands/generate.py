"""`elastane generate`: answers of the tuned model (or its base) to given prompts."""

from __future__ import annotations

from tasks.errors import UserError
from tasks.params import Params
from tasks.paths import Paths
from tasks.stage import heartbeat

BATCH = 16


def generate(
    params: Params, paths: Paths, prompts: list[str], max_new_tokens: int | None, base: bool
) -> list[str]:
    """One answer a prompt, greedy, in the order of the prompts.

    Args:
        max_new_tokens: None takes `evaluate.max_new_tokens`.
        base: answer with the base model instead of the tuned one.

    Raises:
        UserError: no prompt, or nothing trained yet.
    """
    wanted = [prompt.strip() for prompt in prompts if prompt.strip()]
    if not wanted:
        raise UserError("generate got no prompt; give one in quotes, or --file with a prompt a line")
    with heartbeat("loading the model"):
        from tasks.trainer import inference, loading

        if base:
            model = loading.load_base(paths, loading.base_dtype()).to(loading.device()).eval()
            tokenizer = loading.load_tokenizer(paths)
        else:
            model, tokenizer = loading.load_tuned(paths)
    length = max_new_tokens or params.evaluate.max_new_tokens
    answers: list[str] = []
    with heartbeat(f"generating {len(wanted)} answer(s)"):
        for start in range(0, len(wanted), BATCH):
            conversations = [
                [{"role": "user", "content": prompt}] for prompt in wanted[start : start + BATCH]
            ]
            answers += inference.generate(model, tokenizer, conversations, length)
    return answers
