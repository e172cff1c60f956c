"""Hooks of mkdocs: pages from outside of docs/, notebooks as pages, help texts of the command, formulas without scripts.

The home page is README.md. Links between files of the repository become links between pages; a link to a file that is no
page becomes its name. A notebook is executed unless runs/notebooks holds an executed copy of the same cells.
"""

import base64
import html
import os
import posixpath
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import griffe
import jupytext
import latex2mathml.converter
import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "notebooks"))
from execute import execute  # noqa: E402

NOTEBOOKS = [path for path in sorted((ROOT / "notebooks").glob("*.py")) if "# %% [markdown]" in path.read_text()]
EXECUTED = ROOT / "runs" / "notebooks"
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    **{str(path.relative_to(ROOT)): str(path.relative_to(ROOT)) for path in ROOT.glob("benchmarks/**/*.md")},
    **{f"notebooks/{path.name}": f"tutorial/{path.stem}.md" for path in NOTEBOOKS},
}
SOURCES = {page: source for source, page in OUTSIDE.items()}


class Docstrings(griffe.Extension):
    """Tell griffe that "Example:" in a docstring is code, not a remark, and write formulas as pages do."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change headings and formulas."""
        if obj.docstring:
            text = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r":math:`([^`]*)`", r"$\1$", text)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the notebooks under Tutorial, in the order of their names."""
    (tutorial,) = (entry for entry in config.nav or [] if "Tutorial" in entry)
    tutorial["Tutorial"] = [page for page in OUTSIDE.values() if page.startswith("tutorial/")]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside of docs/."""
    for source, page in OUTSIDE.items():
        path = ROOT / source
        if path.suffix == ".md":
            files.append(File.generated(config, page, content=path.read_text()))
            continue
        text, images = markdown(executed(path), path.stem)
        files.append(File.generated(config, page, content=text))
        for name, content in images.items():
            files.append(File.generated(config, f"tutorial/{name}", content=content))
    return files


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs: the copy in runs/notebooks if its cells are those of the source, else a fresh one."""
    notebook = jupytext.read(path)
    copy = EXECUTED / f"{path.stem}.ipynb"
    if copy.exists():
        found = nbformat.read(copy, as_version=4)
        if [cell.source for cell in found.cells] == [cell.source for cell in notebook.cells]:
            return found
    return nbformat.read(execute(path, EXECUTED, cell_seconds=600), as_version=4)


def markdown(notebook: nbformat.NotebookNode, stem: str) -> tuple[str, dict[str, bytes]]:
    """The text of a page, and the pictures in it by their file names."""
    parts: list[str] = []
    images: dict[str, bytes] = {}
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
        for data in (output.data for output in cell.outputs if "image/png" in output.get("data", {})):
            name = f"{stem}_{len(images) + 1}.png"
            images[name] = base64.b64decode(data["image/png"])
            parts.append(f"![{data.get('text/plain', 'Figure')}]({name})")
    return "\n\n".join(parts) + "\n", images


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links by pages, not by files; below each command that asks for help, the help."""
    here = page.file.src_uri
    source = SOURCES.get(here, f"docs/{here}")

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        found = OUTSIDE.get(place, place.removeprefix("docs/") if place.startswith("docs/") else None)
        if found is None:
            return f"`{text.strip('`')}`"
        return f"[{text}]({posixpath.relpath(found, posixpath.dirname(here) or '.')}{anchor or ''})"

    def help_of(match: re.Match[str]) -> str:
        command = [sys.executable, "-m", "lp_jax", *match[1].split()]
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"COLUMNS": "100"}, capture_output=True, text=True, check=True
        )
        return f"{match[0]}\n\n```text\n{done.stdout.rstrip()}\n```"

    if not here.startswith("tutorial/"):
        markdown = re.sub(r"\[([^][]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)", link, markdown)
    return re.sub(r"```console\n\$ lp-jax (.*--help.*)\n```", help_of, markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Formulas as MathML, which browsers draw by themselves; numbers in brackets in one line of a table's cell."""

    def formula(match: re.Match[str]) -> str:
        display = "block" if match[1] == "[" else "inline"
        return latex2mathml.converter.convert(html.unescape(match[2]), display=display)

    content = re.sub(r"(\(\de)-(\d+\)</td>)", "\\1\u2011\\2", content)
    return re.sub(
        r'<(?:span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</(?:span|div)>', formula, content, flags=re.DOTALL
    )
