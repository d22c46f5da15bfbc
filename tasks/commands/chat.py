"""`elastane chat`: a conversation with the tuned model in the terminal."""

from __future__ import annotations

import sys

from tasks.params import Params
from tasks.paths import Paths
from tasks.stage import heartbeat, say

LEAVE = frozenset({"exit", "quit"})


def chat(params: Params, paths: Paths) -> None:
    """Reads a turn a line from stdin and prints the answer; an empty line starts afresh, `exit` or end of input leaves.

    Raises:
        UserError: nothing trained yet.
    """
    with heartbeat("loading the model"):
        from tasks.trainer import inference, loading

        model, tokenizer = loading.load_tuned(paths)
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
        messages.append({"role": "user", "content": line.strip()})
        answer = inference.generate(model, tokenizer, [messages], params.evaluate.max_new_tokens)[0]
        messages.append({"role": "assistant", "content": answer})
        print(answer, flush=True)
