"""Write the pages of the site into build/pages, in plain Markdown, for any program that makes a site of such pages.

``python docs/site_pages.py`` is run before ``mkdocs build``; ``make docs`` does both. The home page is README.md. Links between
files of the repository become links between pages; a link to a file that is no page becomes its name. Formulas become
MathML, which browsers draw by themselves. Notebooks become pages; one is executed unless runs/notebooks holds an executed
copy of the same cells. Below each command that asks for help stands the help.
"""

import base64
import os
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = [
    path
    for path in sorted((ROOT / "notebooks").glob("*.py"))
    if "# %% [markdown]" in path.read_text()
]
EXECUTED = ROOT / "runs" / "notebooks"
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    **{
        str(path.relative_to(ROOT)): str(path.relative_to(ROOT))
        for path in ROOT.glob("benchmarks/**/*.md")
    },
    **{f"notebooks/{path.name}": f"tutorial/{path.stem}.md" for path in NOTEBOOKS},
}
CODE = re.compile(r"^( *)(```+).*?^\1\2$|`[^`\n]+`", flags=re.MULTILINE | re.DOTALL)
FORMULA = re.compile(r"(?<![\\$\w])(\$\$?)(?! )([^$]+?)(?<! )\1(?![\d$])")


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs: the copy in runs/notebooks if its cells are those of the source, else a fresh one."""
    notebook = jupytext.read(path)
    copy = EXECUTED / f"{path.stem}.ipynb"
    if copy.exists():
        found = nbformat.read(copy, as_version=4)
        if [cell.source for cell in found.cells] == [cell.source for cell in notebook.cells]:
            return found
    sys.path.insert(0, str(path.parent))
    from execute import execute

    said = "it is kept in runs/notebooks until its cells change"
    print(f"Executing notebooks/{path.name}, some minutes; {said}.", flush=True)
    return nbformat.read(execute(path, EXECUTED, cell_seconds=600), as_version=4)


def from_notebook(notebook: nbformat.NotebookNode, stem: str) -> tuple[str, dict[str, bytes]]:
    """The text of a page, and the files that it shows or links to by their names."""
    files = {f"{stem}.ipynb": nbformat.writes(notebook).encode()}
    parts = []
    for cell in notebook.cells:
        if cell.cell_type != "code":
            parts.append(cell.source)
            continue
        if not cell.source:
            continue
        parts.append(f"```python\n{cell.source}\n```")
        printed = ""  # in several pieces, and before pictures of the same cell
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/png" not in data:
                printed += output.get("text") or data.get("text/plain") or ""
        if printed:
            parts.append(f"```text\n{printed.rstrip()}\n```")
        for data in (
            output.data for output in cell.outputs if "image/png" in output.get("data", {})
        ):
            name = f"{stem}_{len(files)}.png"
            files[name] = base64.b64decode(data["image/png"])
            parts.append(f"![{data.get('text/plain', 'Figure')}]({name})")
    parts.insert(1, f"[Download this notebook]({stem}.ipynb)")
    return "\n\n".join(parts) + "\n", files


def outside_code(change: "re.Pattern[str]", to, text: str) -> str:
    """Replace what a pattern finds in Markdown, except in code."""
    parts, end = [], 0
    for code in CODE.finditer(text):
        parts += [change.sub(to, text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, change.sub(to, text[end:])])


def with_links(text: str, source: str, page: str) -> str:
    """The text with links to pages in the place of links to files."""

    def link(match: re.Match[str]) -> str:
        shown, target, anchor = match.groups()
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        found = OUTSIDE.get(
            place, place.removeprefix("docs/") if place.startswith("docs/") else None
        )
        if found is None:
            return f"`{shown.strip('`')}`"
        return (
            f"[{shown}]({posixpath.relpath(found, posixpath.dirname(page) or '.')}{anchor or ''})"
        )

    return re.sub(r"\[([^][]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)", link, text)


def with_formulas(text: str) -> str:
    """The text with MathML in the place of formulas."""
    import latex2mathml.converter  # of the extra lp_jax[docs]

    def formula(match: re.Match[str]) -> str:
        drawn = latex2mathml.converter.convert(
            match[2].strip(), display="block" if match[1] == "$$" else "inline"
        )
        return f"\n<div>{drawn}</div>\n" if match[1] == "$$" else f"<span>{drawn}</span>"

    return outside_code(FORMULA, formula, text)


def with_help(text: str) -> str:
    """The text with the help below each command that asks for it."""

    def help_of(match: re.Match[str]) -> str:
        command = [sys.executable, "-m", "lp_jax", *match[1].split()]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"COLUMNS": "100"},
            capture_output=True,
            text=True,
            check=True,
        )
        return f"{match[0]}\n\n```text\n{done.stdout.rstrip()}\n```"

    return re.sub(r"```console\n\$ lp-jax (.*--help.*)\n```", help_of, text)


def pages() -> dict[str, str]:
    """The sources of all pages but notebooks, by the pages' names."""
    inside = {
        str(path.relative_to(ROOT / "docs")): str(path.relative_to(ROOT))
        for path in ROOT.glob("docs/**/*.md")
    }
    return inside | {page: source for source, page in OUTSIDE.items() if source.endswith(".md")}


def main(folder: Path = ROOT / "build" / "pages") -> None:
    """Write all pages and pictures."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(
        ROOT / "docs",
        folder,
        ignore=shutil.ignore_patterns("*.py", "*.md", "*.json", "__pycache__"),
    )
    (folder / "tutorial").mkdir()
    texts = {
        page: with_links((ROOT / source).read_text(), source, page)
        for page, source in pages().items()
    }
    for path in NOTEBOOKS:
        texts[f"tutorial/{path.stem}.md"], files = from_notebook(executed(path), path.stem)
        for name, content in files.items():
            (folder / "tutorial" / name).write_bytes(content)
    for page, text in texts.items():
        text = re.sub(
            r"(\(\de)-(\d+\) *\|)", "\\1\u2011\\2", text
        )  # keep a cell's "(3e-4)" on one line
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        (folder / page).write_text(with_help(with_formulas(text)))


if __name__ == "__main__":
    main()
