"""Tables: in the terminal, and as Markdown and CSV files that can be pasted into the docs."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Cell = str | float | int | None


def text_of(cell: Cell) -> str:
    """A number with as many digits as it needs, a blank for nothing."""
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.3f}".rstrip("0").rstrip(".") if abs(cell) < 1e6 else f"{cell:.4g}"
    return str(cell)


def percent(part: float | None, digits: int = 2) -> str | None:
    return None if part is None else f"{100 * part:.{digits}f}%"


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    """Print a table."""
    table = Table(title=title, box=None, title_justify="left")
    for number, name in enumerate(header):
        table.add_column(name, justify="left" if number == 0 else "right", no_wrap=number == 0)
    for row in rows:
        table.add_row(*(escape(text_of(cell)) for cell in row))
    Console(width=200).print(table)


def markdown(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    lines += ["| " + " | ".join(text_of(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def write_markdown(path: Path, title: str, parts: Sequence[str]) -> None:
    """A Markdown file: a title, then paragraphs and tables."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# {title}\n\n" + "\n".join(parts), encoding="utf-8")


def write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(header)
        writer.writerows([text_of(cell) for cell in row] for row in rows)
