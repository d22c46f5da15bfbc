"""Stage evaluate: the tuned model beside its base on held-out rows, by loss and by their own answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tasks.contracts import DataManifest, EvalReport, Sample, Samples, Score
from tasks.data.prepared import Split
from tasks.params import EvaluateParams, Params
from tasks.paths import Paths
from tasks.stage import heartbeat, say, stage_main

if TYPE_CHECKING:
    from tasks.data.row_prompt import Prompt


def evaluate(params: Params, paths: Paths) -> EvalReport:
    """Scores base and tuned on the same held-out rows and writes eval_report.json and samples.json.

    Rows are stored by content hash, so the first `evaluate.max_rows` of them are a fixed random draw. Answers are
    generated behind the same text that a row was learnt with; a plain text has none, and counts by its loss alone.
    """
    with heartbeat("loading torch and transformers"):
        from tasks.trainer.loading import read_final

    final = read_final(paths)
    split = Split.open(paths.prepared, "validation")
    rows = list(range(min(len(split), params.evaluate.max_rows or len(split))))
    shown, note = _shown(split, rows, params.evaluate.samples)
    if note:
        say(f"evaluate: {note}")
    whole = final.finetuning_type == "full" or final.embeddings_trained
    both = _two_models if whole else _adapter
    (base, base_answers), (tuned, tuned_answers) = both(
        params.evaluate, paths, split, rows, list(shown.values())
    )
    Samples(
        run_key=final.run_key,
        note=note,
        samples=tuple(
            Sample(prompt=prompt.shown, reference=split.reference(row), base=base_answer, tuned=tuned_answer)
            for (row, prompt), base_answer, tuned_answer in zip(
                shown.items(), base_answers, tuned_answers, strict=True
            )
        ),
    ).write(paths.samples)
    report = EvalReport(
        run_key=final.run_key,
        content_hash=final.content_hash,
        data_hash=DataManifest.read(paths.manifest).content_hash,
        rows=len(rows),
        base=base,
        tuned=tuned,
        loss_improvement=base.loss - tuned.loss,
    )
    report.write(paths.eval_report)
    say(f"evaluate: loss {base.loss:.4f} before, {tuned.loss:.4f} after, on {len(rows)} held-out rows")
    return report


def _shown(split: Split, rows: list[int], count: int) -> tuple[dict[int, Prompt], str]:
    """The first `count` rows that an answer can be generated for, and what to say of those that it cannot."""
    shown: dict[int, Prompt] = {}
    plain = 0
    for row in rows:
        if len(shown) == count:
            break
        prompt = split.prompt(row)
        if prompt is None:
            plain += 1
        else:
            shown[row] = prompt
    if not plain:
        return shown, ""
    which = "all held-out rows are" if plain == len(rows) else f"{plain} of the first held-out rows are"
    return (
        shown,
        f"{which} plain text, which follows no prompt: they count by their loss, and no answer is generated for them",
    )


Judged = tuple[Score, list[str]]


def _adapter(
    params: EvaluateParams, paths: Paths, split: Split, rows: list[int], shown: list[Prompt]
) -> tuple[Judged, Judged]:
    from tasks.trainer.inference import as_base
    from tasks.trainer.loading import load_tuned

    with heartbeat("loading the tuned model"):
        model, tokenizer = load_tuned(paths)
    judge = _judge(params, split, rows, shown)
    with as_base(model) as base:
        before = judge(base, tokenizer, "base")
    return before, judge(model, tokenizer, "tuned")


def _two_models(
    params: EvaluateParams, paths: Paths, split: Split, rows: list[int], shown: list[Prompt]
) -> tuple[Judged, Judged]:
    from tasks.trainer.loading import inference_dtype, load_base_of, load_tokenizer, load_tuned, read_final
    from tasks.trainer.placement import place

    judge = _judge(params, split, rows, shown)
    with heartbeat("loading the base model"):
        method = read_final(paths).finetuning_type
        base = place(load_base_of(method, paths, inference_dtype(paths.final)))
    before = judge(base, load_tokenizer(paths), "base")
    del base
    with heartbeat("loading the tuned model"):
        tuned, tokenizer = load_tuned(paths)
    return before, judge(tuned, tokenizer, "tuned")


def _judge(
    params: EvaluateParams, split: Split, rows: list[int], shown: list[Prompt]
) -> Callable[..., Judged]:
    from tasks.trainer.inference import answer_what_fits, score

    def judge(model: object, tokenizer: object, label: str) -> Judged:
        scored = score(model, split, rows, params.batch_size, label)
        if not shown:
            return scored, []
        with heartbeat(f"generating {len(shown)} answers with the {label} model"):
            return scored, answer_what_fits(model, tokenizer, shown, params.max_new_tokens)

    return judge


def main() -> None:
    stage_main("evaluate", evaluate)


if __name__ == "__main__":
    main()
