"""`elastane generate`: answers of the tuned model (or its base) to given prompts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.commands.tuned import tuned_folder
from tasks.errors import UserError
from tasks.params import Params
from tasks.paths import Paths
from tasks.sampling import GREEDY, Sampling
from tasks.stage import heartbeat, say

if TYPE_CHECKING:
    from tasks.data.row_prompt import Prompt

LOOKED_AT = 1000  # held-out rows, a random draw


def generate(
    params: Params,
    paths: Paths,
    prompts: list[str],
    max_new_tokens: int | None,
    base: bool,
    version: str | None = None,
    sampling: Sampling = GREEDY,
    seed: int | None = None,
) -> list[str]:
    """One answer a prompt, in the order of the prompts; see `as_learnt` for what is put around them.

    Args:
        max_new_tokens: None takes `evaluate.max_new_tokens`.
        base: answer with the base model instead of the tuned one.
        version: a registered one, `models:/name/3`; None takes `checkpoints/final/`.
        seed: of what is drawn; None takes that of the recipe.

    Raises:
        UserError: no prompt, one that is longer than the model's context, or nothing trained yet.
    """
    wanted = [prompt for prompt in prompts if prompt.strip()]
    if not wanted:
        raise UserError("generate got no prompt; give one in quotes, or --file with a prompt a line")
    if base and version:
        raise UserError(f"--base and --model {version} name two models; leave one out")
    chosen = nullcontext(paths.final) if base else tuned_folder(params, paths, version)
    with chosen as folder:
        model, tokenizer = loaded(paths, None if base else folder)
        from tasks.trainer.inference import generate as answers

        draw(params.seed if seed is None else seed)
        length = max_new_tokens or params.evaluate.max_new_tokens
        asked = as_learnt(paths, tokenizer, wanted)
        with heartbeat(f"generating {len(wanted)} answer(s)"):
            return answers(model, tokenizer, asked, length, sampling)


def as_learnt(paths: Paths, tokenizer: Any, texts: Sequence[str]) -> list[Prompt]:
    """Each text as a question written by the chat template; or as it stands, to be continued, where no held-out row of
    `data/prepared/` is a conversation, or the tokenizer has no template.
    """
    from tasks.data.prepared import Split
    from tasks.data.row_prompt import Prompt

    bare = not tokenizer.chat_template
    if not bare and (paths.prepared / "validation.arrow").is_file():
        split = Split.open(paths.prepared, "validation")
        prompts = (split.prompt(row) for row in range(min(len(split), LOOKED_AT)))
        bare = all(prompt is None or prompt.text is not None for prompt in prompts)
    if bare:
        say("prompts are continued as they stand, since what is learnt here has no chat template around it")
        return [Prompt(text=text) for text in texts]
    return [Prompt([{"role": "user", "content": text.strip()}]) for text in texts]


def loaded(paths: Paths, folder: Path | None) -> tuple[Any, Any]:
    """Model and tokenizer, ready to answer: what was tuned, in `folder`, or with None the base."""
    with heartbeat("loading the model"):
        from tasks.trainer import loading
        from tasks.trainer.placement import place

        if folder is not None:
            return loading.load_tuned(paths, folder)
        return place(loading.load_base(paths, loading.base_dtype())), loading.load_tokenizer(paths)


def draw(seed: int) -> None:
    """What is drawn from now on is drawn from `seed`."""
    import torch

    torch.manual_seed(seed)
