"""What `elastane data` prints: learnt tokens in green, all else dim."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tasks.commands.data import DataView, Sample
from tasks.contracts import DataManifest

BAR = 40  # characters of the longest


def show(view: DataView, console: Console) -> None:
    manifest = view.manifest
    console.print(_sources(manifest))
    console.print(_lengths(manifest))
    if manifest.packed:
        packed = manifest.packed
        console.print(f"Packed: {manifest.train.rows} rows in {packed.packs} packs, {packed.fill:.1%} full.")
    if manifest.rejected:
        console.print(_left_out(view))
    for sample in view.samples:
        console.print(_row(view.split, sample))
    console.print("Green is learnt, dim is only read.", style="italic")


def _sources(manifest: DataManifest) -> Table:
    table = Table(title="Sources", title_justify="left")
    for name in ("source", "format", "rows in", "train", "validation", "tokens", "share"):
        table.add_column(name, justify="left" if name in ("source", "format") else "right")
    total = max(1, sum(source.tokens for source in manifest.sources))
    for source in manifest.sources:
        counts = (source.rows_in, source.train_rows, source.validation_rows, source.tokens)
        told = [f"{count:,}" for count in counts]
        table.add_row(Text(source.name), source.format, *told, f"{source.tokens / total:.0%}")
    return table


def _lengths(manifest: DataManifest) -> Table:
    table = Table(
        title=f"Rows by length (at most {manifest.max_length} tokens)", title_justify="left", box=None
    )
    table.add_column("tokens up to", justify="right")
    table.add_column("rows", justify="right")
    table.add_column("")
    most = max((one.rows for one in manifest.length_histogram), default=1)
    for one in manifest.length_histogram:
        table.add_row(f"{one.upper:,}", f"{one.rows:,}", "█" * -(-BAR * one.rows // max(1, most)))
    if manifest.truncated:
        table.caption = f"{manifest.truncated:,} were longer and are cut"
    return table


def _left_out(view: DataView) -> Table:
    table = Table(title=f"Left out: {sum(view.manifest.rejected.values()):,} rows", title_justify="left")
    table.add_column("rows", justify="right")
    table.add_column("reason")
    table.add_column("first at")
    first: dict[str, str] = {}
    for entry in view.rejected:
        first.setdefault(str(entry["reason"]), str(entry.get("where", "")))
    for reason, count in sorted(view.manifest.rejected.items(), key=lambda item: -item[1]):
        table.add_row(f"{count:,}", Text(reason), Text(first.get(reason, "")))
    return table


def _row(split: str, sample: Sample) -> Text:
    text = Text(f"\n{split} row {sample.row}: {sample.tokens} tokens, {sample.learnt} learnt\n", style="bold")
    for span in sample.spans:
        text.append(span.text, style="green not bold" if span.learnt else "dim not bold")
    return text
