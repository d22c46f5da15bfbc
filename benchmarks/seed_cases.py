"""The cases of the two documents this project grew from, as the planner sees them, beside what they claim.

Usage: python -m benchmarks.seed_cases
Writes benchmarks/results/seed-cases.json and prints a Markdown table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.record import write
from tasks.commands.plan_question import Question, ask
from tasks.errors import UserError
from tasks.planner.explain import cost_of
from tasks.planner.problem import Pins
from tasks.planner.search import search
from tasks.planner.words import gib, settings

ALPACA = {
    "sequence": 512,
    "mean_row": 200.0,
}  # rows of alpaca_gpt4_zh: cut at 512 tokens, some 200 on average
IMAGE = {"sequence": 3072, "mean_row": 3000.0, "image_size": (672, 672)}
ASSUMED = (
    "Qwen-7B: alpaca rows of 200 tokens on average and 512 at most, batch 4 x accumulation 4 a GPU, no padding; "
    "13 B: Baichuan2-13B, rows of 2,048 tokens, 128 a step; LLaVA: one 672x672 image (2,928 tokens) and 72 of text a "
    "row, 32 a step"
)


@dataclass(frozen=True)
class Case:
    """One case; `claimed` tokens/s where its document measured them, under the split of `pins`."""

    title: str
    question: Question
    claimed: float | None = None


def _qwen(gpus: int, claimed: float, pp: int = 1) -> Case:
    words = f"{gpus}xA100-40G" if gpus > 1 else "A100-40G"
    pins = Pins(micro_batch=4, accumulation=4 * pp, data_parallel=gpus // pp, pp=pp)
    split = f", data parallel {gpus // pp} x pipeline {pp}" if pp > 1 else ""
    title = f"Qwen-7B LoRA, {gpus} x A100-40G, batch 4 x 4 a GPU{split}"
    return Case(title, Question("qwen-7b", words, "lora", batch=16 * gpus, pins=pins, **ALPACA), claimed)  # type: ignore[arg-type]


def _free(title: str, model: str, hardware: str, method: str, batch: int, **rows: Any) -> Case:
    return Case(title, Question(model, hardware, method, batch=batch, **rows))  # type: ignore[arg-type]


CASES = (
    _qwen(1, 1200),
    _qwen(4, 4200),
    _qwen(8, 7500, pp=2),
    _free("Qwen-7B LoRA, 1 x A100-40G, free choice", "qwen-7b", "A100-40G", "lora", 16, **ALPACA),
    _free("Qwen-7B LoRA, 8 x A100-40G, free choice", "qwen-7b", "8xA100-40G", "lora", 128, **ALPACA),
    _free(
        "Baichuan2-13B full, 2 nodes x 8 A100-80G, free choice",
        "baichuan2-13b",
        "8xA100-80G x 2 nodes IB200",
        "full",
        128,
        sequence=2048,
        mean_row=2048,
    ),
    Case(
        "Baichuan2-13B full, 4 nodes x 8 A100-80G, dp 8 x tp 2 x pp 2 as asked",
        Question(
            "baichuan2-13b",
            "8xA100-80G x 4 nodes IB200",
            "full",
            sequence=2048,
            batch=128,
            pins=Pins(data_parallel=8, tp=2, pp=2, micro_batch=1),
        ),
    ),
    *(
        _free(f"LLaVA-v1.6-7B {method}, {words}", "llava-v1.6-vicuna-7b", words, method, 32, **IMAGE)
        for words in ("2xRTX3090", "2xA100-80G")
        for method in ("lora", "full")
    ),
)


def answer(case: Case) -> dict[str, Any]:
    """The best plan of a case in figures, or why there is none."""
    _, problem, _ = ask(case.question, None)
    row: dict[str, Any] = {"case": case.title, "claimed_tokens_per_second": case.claimed}
    try:
        best = search(problem).fitting[0]
    except UserError as error:
        return {**row, "refused": str(error)}
    cost = cost_of(best)
    return {
        **row,
        "plan": settings(best.plan),
        "predicted_tokens_per_second": round(cost.tokens_per_second),
        "peak_gib": round(cost.peak_bytes / 2**30, 1),
        "memory": f"{gib(cost.peak_bytes)} of {gib(cost.memory_limit_bytes)}",
        "seconds_a_step": cost.total_seconds,
        "mfu": cost.mfu,
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| case | plan | GiB a GPU | predicted tokens/s | the document says |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        claimed = f"{row['claimed_tokens_per_second']:,.0f}" if row["claimed_tokens_per_second"] else "–"
        if "refused" in row:
            lines.append(f"| {row['case']} | none fits | – | – | {claimed} |")
            continue
        speed = f"{row['predicted_tokens_per_second']:,}"
        lines.append(f"| {row['case']} | {row['plan']} | {row['memory']} | {speed} | {claimed} |")
    return "\n".join(lines)


def main() -> None:
    rows = [answer(case) for case in CASES]
    write("seed-cases", {"assumed": ASSUMED, "rows": rows})
    print(table(rows))


if __name__ == "__main__":
    main()
