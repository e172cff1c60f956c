"""The pages: their examples run and print what they say, their links lead somewhere, no public name is missing."""

import ast
import contextlib
import doctest
import functools
import importlib
import io
import json
import re
import types
from decimal import Decimal, InvalidOperation
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import pytest

import lp_jax.data
import lp_jax.nn
import lp_jax.planning
import lp_jax.train
import lp_jax.viz

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in sorted(
        [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]
    )
}
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", flags=re.MULTILINE | re.DOTALL)
VALUE = re.compile(
    r"True|False|None|[-+\d\[('\"]"
)  # how a comment begins that is a value, not a remark
# test_extending.py, test_data*.py and test_compiled.py run these, which need files, look at what the examples define, or compile
# for accelerators.
ELSEWHERE = {"docs/extending.md", "docs/data.md", "docs/accelerators.md"}
# conftest.py has made the devices; probes of the planner shall not take their ten seconds.
CHANGES = {
    'jax.config.update("jax_num_cpu_devices", 4)': "",
    "machine=gpu": "machine=gpu, seconds=0.1",
}
# jax 0.12 keeps one array of a tanh for the adjoint where 0.10 keeps two; docs/planning.md says so.
MEGABYTES = (
    {} if jax.__version__.startswith("0.10.") else {"  21.1  ": "  19  ", "  14.8  ": "  12.7  "}
)


def blocks(page):
    """Languages and texts of a page's code blocks."""
    return [(language, text) for _, language, text in FENCE.findall(PAGES[page])]


def close(promised, found):
    """Whether two words are equal, or numbers that differ by at most one in the last digit that is promised."""
    if promised == found:
        return True
    with contextlib.suppress(InvalidOperation):
        a, b = (Decimal(word.strip("[](),")) for word in (promised, found))
        return abs(a - b) <= Decimal(1).scaleb(int(a.as_tuple().exponent))
    return False


def same(promised, found):
    """Whether words follow each other as promised; "..." on a line stands for any."""
    first, *parts = (part.split() for part in re.split(r"^\.\.\.$", promised, flags=re.MULTILINE))
    start, found = 0, found.split()
    for number, words in enumerate([first, *parts]):
        end = len(found) - len(words)
        places = range(start, end + 1) if number < len(parts) else range(max(start, end), end + 1)
        fits = [i for i in (places if number else places[:1]) if all(map(close, words, found[i:]))]
        if not fits or (number == 0 and fits[0] != 0):
            return False
        start = fits[0] + len(words)
    return True


def run(page):
    """Run the examples from top to bottom; what they print stands behind them in comments, or in a text block below."""
    names, pending = {"__name__": "example"}, ""
    for language, text in blocks(page):
        if language == "text" and pending:
            for old, new in MEGABYTES.items():
                text = text.replace(old, new)
            assert same(f"...\n{text}", pending), f"{page} promises\n{text}\nand prints\n{pending}"
            pending = ""
        if language != "python":
            continue
        for old, new in CHANGES.items():
            text = text.replace(old, new)
        lines = text.splitlines()
        for statement in ast.parse(text).body:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(ast.Module([statement], []), page, "exec"), names)
            promised = (
                lines[statement.end_lineno - 1][statement.end_col_offset :]
                .strip()
                .removeprefix("# ")
            )
            if VALUE.match(promised) and printed.getvalue():
                assert same(promised, printed.getvalue()), (
                    f"{page} promises {promised}, not {printed.getvalue()}"
                )
            else:
                pending += printed.getvalue()


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in ELSEWHERE and dict(blocks(page)).get("python")]
)
@pytest.mark.usefixtures("as_users_run_it")
def test_examples_run_and_print_what_they_say(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(page)
    plt.close("all")


def test_output_is_compared():
    assert same("a 3e-05", "a 2.9e-05") and same("1.50 x\n...\n[2, 3]", "1.505 x y 7 [2, 3]")
    assert (
        not same("a 3e-05", "a 5e-05")
        and not same("1.50", "1.52")
        and not same("a", "a b")
        and not same("a b", "a")
    )
    assert (
        not same("a\n...\nb", "a c")
        and not same("a\n...\nb", "a b c")
        and not same("...\nb", "b a")
    )
    assert (
        same("...\nb\n...", "a b c")
        and same("...\nb", "b b")
        and not same("a\n...\na", "a")
        and not same("a", "")
    )


def anchors(text):
    """Anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), flags=re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES)
def test_links_exist(page):
    for target, anchor in re.findall(
        r"\]\(([^)#\s]*)(?:#([^)\s]*))?[^)]*\)", FENCE.sub("", PAGES[page])
    ):
        if target.startswith("https://"):
            continue
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path.read_text()), f"{target}#{anchor}"


def test_every_page_is_in_the_site_and_its_links_lead_to_pages(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    site = importlib.import_module("site_pages")
    nav = set(re.findall(r"(\S+\.md)\b", (ROOT / "mkdocs.yml").read_text()))
    names = {*site.pages(), *site.OUTSIDE.values()}
    assert names == nav and f"tutorial/{site.NOTEBOOKS[0].stem}.md" in nav
    for page, source in site.pages().items():
        text = site.with_links((ROOT / source).read_text(), source, page)
        for target in re.findall(r"\]\((?!\w+:|#)([^)#\s]+\.md)", FENCE.sub("", text)):
            assert (ROOT / page).parent.joinpath(target).resolve().relative_to(
                ROOT
            ).as_posix() in names, (page, target)


MAIN = (lp_jax, lp_jax.multigrid, lp_jax.nn, lp_jax.train, lp_jax.data, lp_jax.planning, lp_jax.viz)


def public(module):
    """The names that a package exports, and their values; its submodules are none of them."""
    names = {name: x for name, x in vars(module).items() if not name.startswith("_")}
    return {name: x for name, x in names.items() if not isinstance(x, types.ModuleType)}


@pytest.mark.parametrize("module", MAIN, ids=lambda module: module.__name__)
def test_every_public_name_is_in_the_reference(module):
    text = "\n".join(text for page, text in PAGES.items() if page.startswith("docs/reference/"))
    listed = [name.rpartition(".") for name in re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE)]
    found = [
        getattr(importlib.import_module(module or name), name, None) for module, _, name in listed
    ]
    missing = [name for name, x in public(module).items() if not any(x is y for y in found)]
    assert public(module) and not missing


def docstring_examples():
    """The code of each docstring that has some, by the name of its class or function; a method counts for its class."""
    parser = doctest.DocTestParser()
    for path in ROOT.glob("lp_jax/**/*.py"):
        for node in ast.parse(path.read_text()).body:
            for part in ast.walk(node):
                if isinstance(part, (ast.ClassDef, ast.FunctionDef)):
                    yield (
                        node.name,
                        "".join(
                            e.source for e in parser.get_examples(ast.get_docstring(part) or "")
                        ),
                    )


@functools.cache
def taught():
    """Full names that stand in an example, which the tests run: of pages, notebooks and docstrings."""
    texts = [text for page in PAGES for language, text in blocks(page) if language == "python"]
    texts += [path.read_text() for path in ROOT.glob("notebooks/[0-9]*.py")]
    texts += [text for _, text in docstring_examples()]
    found = set()
    for node in (node for text in texts for node in ast.walk(ast.parse(text))):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found |= {ast.unparse(node), f"lp_jax.{ast.unparse(node)}"}
    return found


@pytest.mark.parametrize("module", MAIN, ids=lambda module: module.__name__)
def test_every_public_name_is_in_an_example(module):
    """In its own docstring, or by its full name in another one, on a page or in a notebook."""
    own = {name for name, text in docstring_examples() if text}
    missing = [
        name for name, x in public(module).items() if f"{module.__name__}.{name}" not in taught()
    ]
    assert not [
        name
        for name in missing
        if name not in own or name != getattr(public(module)[name], "__name__", "")
    ]


def test_the_readme_is_short_and_begins_with_what_any_reader_can_run():
    text = PAGES["README.md"]
    places = [
        text.index(found)
        for found in ("pip install", "lp-jax demo", "import jax", "make demo", "make test")
    ]
    assert places == sorted(places) and len(text.split()) < 800
    code = "\n".join(text for language, text in blocks("README.md") if language == "python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 16


def test_tables_of_a_gpu_hold_the_numbers_that_are_kept():
    """Rows of docs/gpu.md: milliseconds of an update, or of a gradient; the README has some of the trainings."""
    kept = json.loads((ROOT / "benchmarks" / "results" / "gpu" / "gpu.json").read_text())["rows"]
    rows = [row for row in kept if "update" in row or "seconds" in row]
    times = {
        (row["title"], row["name"]): row.get("update") or row["seconds"]["median"] for row in rows
    }
    trained = {row["title"] for row in rows if "update" in row}
    rows = [
        line
        for line in PAGES["docs/gpu.md"].splitlines()
        if line.startswith("| ") and line.count("|") == 6
    ]
    shown = set()
    for title, *cells in ([cell.strip() for cell in row.strip("|").split("|")] for row in rows):
        if (title, "default") not in times:
            continue
        scan, default, other, ratio = (cell.replace("**", "") for cell in cells)
        number, _, name = other.partition(", ")
        found = {"lax.scan, unroll=8": scan, "default": default} | ({name: number} if name else {})
        for program, text in found.items():
            assert close(text, str(1e3 * times[title, program])), (title, program)
        best = min(times[title, program] for program in found if program != "default")
        assert close(ratio, str(times[title, "default"] / best)), title
        shown.add(title)
    assert trained < shown
    table = PAGES["README.md"].partition("| Training |")[2].partition("\n\n")[0].splitlines()[2:]
    for title, baseline, default, ratio in (
        [cell.strip() for cell in row.strip("|").split("|")] for row in table
    ):
        title = title.replace(" (diagonal matrices)", "")
        best = min(v for (t, program), v in times.items() if t == title and program != "default")
        assert close(baseline.partition(",")[0], str(1e3 * best)), title
        assert close(default, str(1e3 * times[title, "default"])), title
        assert close(ratio, str(best / times[title, "default"])), title
    assert len(table) == 4
