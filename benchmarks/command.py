"""What the commands of all suites have in common: options, progress, files, interruption."""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jax

from benchmarks import report
from benchmarks.harness import LEAST_ROUNDS, Contender, Tell, measure, summary
from benchmarks.manifest import cores, device_slug, limit_jax_threads, load, manifest
from lp_jax.cli._errors import describe
from lp_jax.cli._heap import keep_heap

Row = tuple[Any, ...]


class Field(NamedTuple):
    """Who takes part in a row, who does not, as (name, reason), and what to call when the row is done."""

    contenders: list[Contender]
    left_out: list[tuple[str, str]]
    close: Callable[[], object] = lambda: None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
    """One command."""

    name: str  # of the module and of the result's files
    title: str  # of table and picture
    about: str  # what is measured, for ``--help``
    examples: Sequence[tuple[str, str]]  # (arguments, what they do), for ``--help``
    sizes: tuple[str, ...]  # what the parts of a row are
    rows: str  # what runs by default, as on the command line
    quick_rows: str  # what runs with ``--quick``
    field: Callable[
        [Row, argparse.Namespace, Tell], Field
    ]  # contenders, the baseline first, each called once
    add_options: Callable[[argparse.ArgumentParser], object] = lambda parser: (
        None
    )  # adds the suite's own options
    row: Callable[[str], Row] = lambda text: two_numbers(text)  # reads a row from the command line

    def title_of(self, row: Row) -> str:
        return ", ".join(map(_words, self.sizes, row))


def run(suite: Suite, arguments: Sequence[str] | None = None) -> int:
    """Run a suite as a command; the exit code."""
    keep_heap()
    parser = _parser(suite)
    options = parser.parse_args(arguments)
    limit_jax_threads(options.threads)
    jax.config.update(
        "jax_enable_compilation_cache", False
    )  # what takes time to compile shall take it
    folder = results_folder(parser, options)
    warn_if_busy()
    settings = {k: v for k, v in vars(options).items() if k not in ("out", "rows", "add")}
    result = new_result(suite.name, suite.title, arguments, settings)
    if options.add:
        earlier = report.kept(folder, suite.name)
        result["rows"] = [{"manifest": earlier["manifest"], **row} for row in earlier["rows"]]
        result["left_out"] = earlier["left_out"]
    progress = Progress()
    try:
        default = suite.quick_rows if options.quick else suite.rows
        for row in options.rows or map(suite.row, default.split()):
            paths = _run_row(suite, row, options, result, folder, progress)
    except KeyboardInterrupt as stopped:
        progress.clear()
        kept = (
            f"; the {len(result['rows'])} finished rows are in {folder}" if result["rows"] else ""
        )
        print(f"Stopped{kept}.", file=sys.stderr)
        return describe(stopped)[1]
    for left in result["left_out"]:
        print(f"Left out: {left['name']} ({left['reason']}).")
    print("Wrote " + ", ".join(map(str, paths)))
    return 0


def bare_parser(
    name: str, about: str, examples: Sequence[tuple[str, str]]
) -> argparse.ArgumentParser:
    """A parser whose help ends with calls, (arguments, what they do)."""
    width = max(len(arguments) for arguments, _ in examples)
    lines = [f"  lp-jax bench {name} {arguments:<{width}}  {what}" for arguments, what in examples]
    return argparse.ArgumentParser(
        prog=f"lp-jax bench {name}",
        description=about,
        epilog="\n".join(["examples:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def common_parser(
    name: str, about: str, examples: Sequence[tuple[str, str]]
) -> argparse.ArgumentParser:
    """A parser with the options of every suite."""
    parser = bare_parser(name, about, examples)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="Run something tiny, to see that all works. Its results are kept apart.",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="Folder for the results (default: runs/bench/DEVICE; --quick: runs/bench-quick/DEVICE).",
    )
    return parser


def results_folder(
    parser: argparse.ArgumentParser, options: argparse.Namespace, device: str | None = None
) -> Path:
    folder: Path = options.out or Path(
        "runs", "bench-quick" if options.quick else "bench", device or device_slug()
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"cannot write to {folder}: {error.strerror}. Name another folder with --out.")
    return folder


def new_result(
    name: str,
    title: str,
    arguments: Sequence[str] | None,
    settings: Mapping[str, Any] | None = None,
) -> report.Result:
    """A result without rows. ``arguments`` are those of the command line, or None, as in a ``main``."""
    given = sys.argv[1:] if arguments is None else arguments
    described = manifest(f"benchmarks.{name}", given)
    about = {"suite": name, "title": title, "manifest": described, "settings": dict(settings or {})}
    return {**about, "rows": [], "left_out": []}


def _run_row(
    suite: Suite,
    row: Row,
    options: argparse.Namespace,
    result: report.Result,
    folder: Path,
    progress: "Progress",
) -> list[Path]:
    title = suite.title_of(row)

    def tell(text: str) -> None:
        progress(f"{title}: {text}")

    field = suite.field(row, options, tell)
    try:
        timings = measure(
            field.contenders,
            rounds=options.rounds or (LEAST_ROUNDS if options.quick else 15),
            warmup=options.warmup,
            min_time=options.min_time,
            budget=options.budget,
            tell=tell,
        )
    finally:
        field.close()
        progress.clear()
    sizes = dict(zip(suite.sizes, row, strict=True))
    new = {"title": title, **sizes, "contenders": summary(field.contenders, timings)}
    titles = [suite.title_of(suite.row(text)) for text in suite.rows.split()]
    kept = [row for row in result["rows"] if row["title"] != title]
    result["rows"] = sorted(
        [*kept, new],
        key=lambda row: titles.index(row["title"]) if row["title"] in titles else len(titles),
    )
    for name, reason in field.left_out:
        if {"name": name, "reason": reason} not in result["left_out"]:
            result["left_out"].append({"name": name, "reason": reason})
    report.show(new)
    return report.save(result, folder, report.panels)


def _words(name: str, size: Any) -> str:
    if isinstance(size, str):
        return size
    return f"{size} {name}" if name.endswith("s") else f"{name} {size}"


def add_only(
    parser: argparse.ArgumentParser, about: str, default: Sequence[str] | None = None
) -> None:
    """Add the option that `wanted` reads."""
    parser.add_argument("--only", nargs="+", metavar="TEXT", default=default, help=about)


def add_numbers(parser: argparse.ArgumentParser, *options: tuple[str, int, str]) -> None:
    """Add options that take a whole number above 0: flag, default and help."""
    for flag, default, about in options:
        parser.add_argument(flag, type=positive, metavar="N", default=default, help=about)


def wanted(name: str, options: argparse.Namespace) -> bool:
    """Whether ``--only``, where it is given, has a part of this name."""
    return options.only is None or any(part.lower() in name.lower() for part in options.only)


class Progress:
    """What goes on, as one line on a terminal; elsewhere as a line every few seconds."""

    def __init__(
        self,
        stream: TextIO | None = None,
        every: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.stream, self.every, self.clock = stream or sys.stderr, every, clock
        self.start = self._last = clock()

    def __call__(self, text: str) -> None:
        now = self.clock()
        line = f"[{now - self.start:4.0f} s] {text}"
        if self.stream.isatty():
            print(f"\r\x1b[K{line}", end="", file=self.stream, flush=True)
        elif now - self._last >= self.every:
            print(line, file=self.stream, flush=True)
            self._last = now

    def clear(self) -> None:
        if self.stream.isatty():
            print("\r\x1b[K", end="", file=self.stream, flush=True)


def warn_if_busy() -> None:
    """Say so where other processes want the processor, which a measurement would show."""
    busy = load()
    if busy is not None and busy > 0.3 * cores():
        print(
            f"Something else runs here (load {busy} on {cores()} cores): times will be off, ratios less so.",
            file=sys.stderr,
        )


def _parser(suite: Suite) -> argparse.ArgumentParser:
    parser = common_parser(suite.name, suite.about, suite.examples)
    pair = ",".join(suite.sizes)
    parser.add_argument(
        "--rows",
        nargs="+",
        type=suite.row,
        metavar=pair,
        help=f"Sizes to run, each {pair} without a space (default: {suite.rows}).",
    )
    add_only(parser, "Run only the baseline and contenders with one of these in their names.")
    parser.add_argument(
        "--add",
        action="store_true",
        help="Keep the rows of an earlier result that are not measured now.",
    )
    for flag, kind, default, about in (
        (
            "--rounds",
            positive,
            None,
            f"Number of interleaved rounds (default: 15; --quick: {LEAST_ROUNDS}).",
        ),
        ("--warmup", positive, 2, "Number of calls before the first that counts (default: 2)."),
        (
            "--min-time",
            _seconds,
            0.05,
            "Seconds of a sample. Shorter calls are repeated within it (default: 0.05).",
        ),
        (
            "--budget",
            _seconds,
            60.0,
            "Seconds per row after which all but the baseline sit out (default: 60).",
        ),
        ("--threads", positive, cores(), "Number of threads of JAX on a CPU (default: all cores)."),
    ):
        parser.add_argument(
            flag, type=kind, metavar="N" if kind is positive else "S", default=default, help=about
        )
    suite.add_options(parser)
    return parser


def two_numbers(text: str) -> Row:
    """A row of two sizes, from the command line."""
    try:
        first, second = map(int, text.split(","))
    except ValueError:
        first = second = 0
    if first < 1 or second < 1:
        raise argparse.ArgumentTypeError(
            f"a row is two whole numbers above 0, such as 4,64; got {text!r}"
        )
    return first, second


def network_row(networks: Iterable[str]) -> Callable[[str], Row]:
    """Reads a row of a network and three sizes from the command line."""
    names = tuple(networks)

    def parse(text: str) -> Row:
        network, *sizes = text.split(",")
        if (
            network not in names
            or len(sizes) != 3
            or not all(s.isdecimal() and int(s) > 0 for s in sizes)
        ):
            raise argparse.ArgumentTypeError(
                f"a row is {' or '.join(names)}, then width or channels, layers or time steps, and batch, such as "
                f"{names[0]},4,256,50; got {text!r}"
            )
        return network, *map(int, sizes)

    return parse


def positive(text: str) -> int:
    """A whole number above 0, from the command line."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number above 0 is wanted; got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise argparse.ArgumentTypeError(f"a number of seconds is wanted; got {text!r}")
    return seconds
