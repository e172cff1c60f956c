"""A result as JSON, as a table and, by the suites' own drawings, as a picture."""

import io
import json
import math
import os
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

Result = dict[str, Any]
"""``suite``, ``title``, ``manifest``, ``settings``, ``rows`` and ``left_out``, as in the JSON file."""

# Okabe and Ito, "Color universal design", 2008
COLOURS = {
    "scan": "#222222",
    "other scan": "#777777",
    "exact": "#0072B2",
    "iterated": "#D55E00",
    "ranks": "#009E73",
    "torch": "#CC79A7",
}
INK, GREY, FAINT = "#222222", "#666666", "#DDDDDD"


def number(value: float | None, digits: int = 2) -> str:
    """So many significant digits; a dash for what is not there."""
    if value is None or not math.isfinite(value):
        return "–"
    exponent = math.floor(math.log10(abs(value))) if value else 0
    return (
        f"{value:.{max(0, digits - 1 - exponent)}f}" if exponent > -4 else f"{value:.{digits - 1}e}"
    )


def scientific(value: float | None) -> str:
    """With a power of ten; a dash for what is not there."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.1e}" if value else "0"


COLUMNS: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
    ("ms", lambda c: number(1e3 * c["seconds"]["median"], 3)),
    ("IQR", lambda c: number(1e3 * (c["seconds"]["q3"] - c["seconds"]["q1"]))),
    ("ratio", lambda c: number(c["ratio"]["median"], 3)),
    ("IQR", lambda c: number(c["ratio"]["q3"] - c["ratio"]["q1"])),
    ("by count", lambda c: number(c.get("counted_ratio"), 3)),
    ("cores", lambda c: f"{c['cores']:.1f}"),
    ("error", lambda c: scientific(c["gradient_error"])),
    ("residual", lambda c: scientific(c["residual_norm"])),
    ("trace s", lambda c: number(c.get("trace_seconds"))),
    ("compile s", lambda c: number(c.get("compile_seconds"))),
    (
        "temp MB",
        lambda c: number(c["temporary_bytes"] / 1e6, 3) if c.get("temporary_bytes") else "–",
    ),
]
"""Titles of the table's columns, and the text for a contender."""

LEGEND = (
    "ms: median time, and interquartile range. ratio: to the baseline, the first line, in the same round; median and "
    "interquartile range. by count: the ratio that the evaluations in a row allow. cores: how many were busy. error: "
    "relative 2-norm error of the gradient with respect to the layers' weights, against the baseline's. residual: last "
    "2-norm of the forward solve's residual. temp: temporary memory of the compiled program."
)


def save(
    result: Result,
    folder: Path,
    draw: Callable[[Result], Figure] | None = None,
    text: Callable[[Result], str] | None = None,
) -> list[Path]:
    """Write numbers, tables as `markdown` has them unless told, and a picture; one that is there is replaced whole."""
    files = {".json": _json(result).encode(), ".md": (text or markdown)(result).encode()}
    if draw is not None:
        files[".png"] = picture(draw(result))
    return [
        _replace(folder / f"{result['suite']}{suffix}", content)
        for suffix, content in files.items()
    ]


def kept(folder: Path, suite: str) -> Result:
    """An earlier result; one without rows where there is none."""
    path = folder / f"{suite}.json"
    earlier: Result = (
        json.loads(path.read_text(encoding="utf-8"))
        if path.exists()
        else {"rows": [], "left_out": []}
    )
    return earlier


def picture(fig: Figure) -> bytes:
    """Return a small PNG: few pixels per inch, and a palette."""
    drawn, packed = io.BytesIO(), io.BytesIO()
    fig.savefig(drawn, dpi=60)
    Image.open(drawn).convert("RGB").quantize(48, Image.Quantize.MAXCOVERAGE).save(
        packed, "png", optimize=True
    )
    return packed.getvalue()


def write_pages(texts: dict[str, list[str]], root: Path) -> list[Path]:
    """Put each text into its page, in the place of the paragraph or table that begins with the same two words."""
    for page, paragraphs in texts.items():
        content = (root / page).read_text(encoding="utf-8")
        for new in paragraphs:
            opening = r"\s+".join(map(re.escape, new.split()[:2]))
            earlier = re.compile(rf"^{opening}.*?(?=\n\n|\n?\Z)", flags=re.MULTILINE | re.DOTALL)
            if not earlier.search(content):
                raise ValueError(f"{page} has no paragraph that begins with {opening!r}.")
            content = earlier.sub(lambda match, new=new: new, content, count=1)
        _replace(root / page, content.encode())
    return [root / page for page in texts]


def sentences(text: str) -> str:
    """A paragraph of a page."""
    return textwrap.fill(text, 140, break_long_words=False, break_on_hyphens=False)


def _replace(path: Path, content: bytes) -> Path:
    part = path.with_suffix(".part")
    part.write_bytes(content)
    os.replace(part, path)
    return path


def _json(value: Any) -> str:
    """Six digits of each float, and null for those that are not finite."""

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: short(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [short(v) for v in value]
        if isinstance(value, float):
            return float(f"{value:.6g}") if math.isfinite(value) else None
        return value

    return json.dumps(short(value), indent=1, ensure_ascii=False) + "\n"


def rounded(result: Result) -> Result:
    """A result as it is read from its file, so that what is written and drawn now is what is written and drawn later."""
    again: Result = json.loads(_json(result))
    return again


def markdown(result: Result) -> str:
    """The tables, readable as they are and by a Markdown viewer."""
    parts = []
    for row in result["rows"]:
        parts += [f"## {row['title']}", pipes(_cells(row))]
        if "manifest" in row:  # it is from an earlier run
            parts.append(origin(row))
    parts.append(LEGEND)
    parts += [f"Left out: {left['name']} ({left['reason']})." for left in result["left_out"]]
    return page(result, *parts)


def page(result: Result, *parts: str) -> str:
    """Paragraphs and tables below the title and the manifest."""
    return "\n\n".join([f"# {result['title']}", origin(result), *parts]) + "\n"


def origin(result: Result) -> str:
    """The manifest in a sentence or two."""
    m = result["manifest"]
    commit = (
        "no commit known"
        if m["commit"] is None
        else f"commit {m['commit'][:10]}{'+changes' * bool(m['dirty'])}"
    )
    versions = ", ".join(f"{name} {version}" for name, version in m["versions"].items() if version)
    return (
        f"{_device(m)}, {m['cores']} cores, JAX on {m['threads']['jax']} threads; load before {m['load_before']}; "
        f"{versions}; {commit}; {m['date']}. `{m['command']}`"
    )


def _device(m: dict[str, Any]) -> str:
    return str(m["processor"] if m["device"]["platform"] == "cpu" else m["device"]["kind"])


def _cells(row: dict[str, Any]) -> list[list[str]]:
    counted = any("counted_ratio" in c for c in row["contenders"])
    columns = [(title, text) for title, text in COLUMNS if title != "by count" or counted]
    lines = [[c["name"], *(text(c) for _, text in columns)] for c in row["contenders"]]
    return [["", *(title for title, _ in columns)], *lines]


def pipes(cells: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    aligned = [
        str.ljust,
        *[str.rjust] * (len(widths) - 1),
    ]  # names to the left, numbers to the right
    head, *lines = (
        [put(text, w) for put, text, w in zip(aligned, line, widths, strict=True)] for line in cells
    )
    rule = ["-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *lines])


def show(row: dict[str, Any]) -> None:
    print(f"\n{row['title']}\n\n{pipes(_cells(row))}", flush=True)


def figure(result: Result, *, width: float, height: float) -> Figure:
    """An empty figure with title and origin."""
    fig = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    fig.suptitle(result["title"], x=0.01, ha="left", fontsize=17, fontweight="bold", color=INK)
    m = result["manifest"]
    commit = (
        ""
        if m["commit"] is None
        else f"   commit {m['commit'][:10]}{'+changes' * bool(m['dirty'])}"
    )
    note = (
        f"{_device(m)}, {m['cores']} cores   jax {m['versions']['jax']}   {m['date'][:10]}{commit}"
    )
    fig.supxlabel(note, x=0.01, ha="left", fontsize=10, color=GREY)
    return fig


def dress(ax: Axes, *, title: str = "", x: str = "", y: str = "", grid: str = "both") -> None:
    ax.set_title(title, loc="left", fontsize=14, color=INK)
    ax.set_xlabel(x, fontsize=12, color=INK)
    ax.set_ylabel(y, fontsize=12, color=INK)
    ax.tick_params(labelsize=11, colors=GREY)
    ax.grid(True, axis=grid, color=FAINT, linewidth=0.8)  # type: ignore[arg-type]
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(GREY)


def bars(ax: Axes, contenders: Sequence[dict[str, Any]]) -> None:
    """Median times as bars with their quartiles; in words the ratio and, of iterated ones, the gradient error.

    The axis is logarithmic where the longest time would hide the others.
    """
    longest = 1e3 * max(c["seconds"]["q3"] for c in contenders)
    shortest = 1e3 * min(c["seconds"]["median"] for c in contenders)
    for i, c in enumerate(contenders):
        median, q1, q3 = (1e3 * c["seconds"][q] for q in ("median", "q1", "q3"))
        ax.barh(i, median, color=COLOURS[c["family"]], height=0.68)
        ax.errorbar(
            median, i, xerr=[[median - q1], [q3 - median]], color=GREY, capsize=3, linewidth=1.4
        )
        words = f"{number(median, 3)} ms   ×{number(c['ratio']['median'], 3)}"
        error = c["gradient_error"]
        if c["family"] in ("iterated", "ranks"):
            finite = error is not None and math.isfinite(error)
            words += f"   error {error:.0e}" if finite else "   no finite gradient"
        ax.annotate(
            words, (q3, i), (6, 0), textcoords="offset points", va="center", fontsize=11, color=INK
        )
    ax.set_ylim(len(contenders) - 0.4, -0.6)
    if longest > _HIDES * shortest:
        ax.set_xscale("log")
        ax.set_xlim(shortest / 2, 3 * longest * (2 * longest / shortest))
    else:
        ax.set_xlim(0, 2.3 * longest)


_HIDES = 30


def panels(result: Result) -> Figure:
    """A panel of `bars` per row, three side by side; names stand where they differ from those to the left."""
    rows = result["rows"]
    columns = min(3, len(rows))
    lines = math.ceil(len(rows) / columns)
    most = max(len(row["contenders"]) for row in rows)
    fig = figure(result, width=3.2 + 6.4 * columns, height=1.6 + (1 + 0.4 * most) * lines)
    before: list[str] = []
    for number, ax in enumerate(fig.subplots(lines, columns, squeeze=False).flat):
        if number >= len(rows):
            ax.set_visible(False)
            continue
        contenders = rows[number]["contenders"]
        names = [c["name"] for c in contenders]
        bars(ax, contenders)
        dress(
            ax,
            title=rows[number]["title"],
            x="ms per call, × the first line, gradient error",
            grid="x",
        )
        told = number % columns > 0 and names == before
        ax.set_yticks(range(len(names)), [""] * len(names) if told else names, color=INK)
        before = names
    return fig
