"""`elastane chat`: a conversation with the tuned model in the terminal."""

from __future__ import annotations

import sys

from tasks.commands.generate import draw, loaded
from tasks.commands.tuned import tuned_folder
from tasks.errors import UserError
from tasks.params import Params
from tasks.paths import Paths
from tasks.sampling import GREEDY, Sampling
from tasks.stage import say

LEAVE = frozenset({"exit", "quit"})


def chat(
    params: Params,
    paths: Paths,
    max_new_tokens: int | None = None,
    version: str | None = None,
    sampling: Sampling = GREEDY,
    seed: int | None = None,
) -> None:
    """Reads a turn a line from stdin and prints the answer; an empty line starts afresh, `exit` or end of input leaves.

    Arguments are those of `generate`. A turn for which the model's context has no room is said and taken back.

    Raises:
        UserError: nothing trained yet, or the model has no chat template.
    """
    with tuned_folder(params, paths, version) as folder:
        model, tokenizer = loaded(paths, folder)
    if not tokenizer.chat_template:
        raise UserError(
            "this model has no chat template, so a conversation cannot be written for it; continue texts with "
            "`elastane generate`, or set prepare_data.template and run again"
        )
    from tasks.trainer.inference import generate

    draw(params.seed if seed is None else seed)
    length = max_new_tokens or params.evaluate.max_new_tokens
    say("Ask; an empty line starts a new conversation, exit or Ctrl-D leaves.")
    messages: list[dict[str, str]] = []
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() in LEAVE:
            return
        if not line.strip():
            messages = []
            say("(new conversation)")
            continue
        asked = [*messages, {"role": "user", "content": line.strip()}]
        try:
            (answer,) = generate(model, tokenizer, [asked], length, sampling)
        except UserError as error:
            say(f"{error}; an empty line starts a new conversation")
            continue
        messages = [*asked, {"role": "assistant", "content": answer}]
        print(answer, flush=True)
