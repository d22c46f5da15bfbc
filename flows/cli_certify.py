"""`elastane certify` on the command line."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from tasks.errors import UserError

Plans = Annotated[
    str | None,
    typer.Option(help="Such as single,ddp2,fsdp2,tp2,pp2,tp2pp2,dp2tp2; the number is the degree."),
]
Steps = Annotated[int, typer.Option(min=1, help="Optimizer steps under each plan.")]
Lower = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option(help="Default: float32; the others are shown, not judged."),
]
Float64 = Annotated[bool, typer.Option("--float64", help="Train in float64 and allow 1e-9.")]
Tiny = Annotated[
    bool, typer.Option("--tiny", help="A built-in tiny recipe instead of yours; runs in any folder.")
]
Family = Annotated[
    Literal["llama", "mistral", "qwen2", "qwen3", "bloom", "glm", "glm4", "llama_alibi"] | None,
    typer.Option(help="With --tiny: this model instead of llama and qwen2."),
]
Method = Annotated[Literal["full", "lora", "qlora"] | None, typer.Option(help="With --tiny (default: full).")]
Device = Annotated[Literal["auto", "cpu"], typer.Option(help="cpu: although there are GPUs.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, all else on stderr.")]


def certify(  # noqa: PLR0913, PLR0917 - one argument an option
    plans: Plans = None,
    steps: Steps = 5,
    precision: Lower = None,
    float64: Float64 = False,
    tiny: Tiny = False,
    family: Family = None,
    method: Method = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Trains some steps under several plans and shows that they learn the same (code 1 if not).

    Plans: single, ddp2, fsdp2, dp2fsdp2, tp2, tp2sp (sequence parallel), pp2 (1f1b), pp2-gpipe, pp2-interleaved,
    pp2-zerobubble, and products of these such as tp2pp2, dp2tp2, fsdp2pp2.
    """
    if float64 and precision:
        raise UserError(f"--float64 and --precision={precision} are two precisions; leave one of them out")
    names = tuple(name.strip() for name in (plans or "").split(",") if name.strip())
    from tasks.commands.certify import Request, run
    from tasks.commands.certify_text import lines

    request = Request(
        names, steps, "float64" if float64 else precision or "float32", tiny, family, method, device
    )
    certificate = run(request)
    print(certificate.to_json() if json else "\n".join(lines(certificate)), end="" if json else "\n")
    if certificate.same is False:
        raise SystemExit(1)
