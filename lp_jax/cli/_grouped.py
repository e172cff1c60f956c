"""Help that teaches: examples first, then the options of one kind together, under a title."""

from collections.abc import Sequence
from typing import Any

import click

Examples = Sequence[tuple[str, str]]


class Option(click.Option):
    """An option with the title of its group."""

    def __init__(self, *args: Any, group: str, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.group = group


class Command(click.Command):
    """A command whose help lists examples, and its options by group, in the order in which groups first appear."""

    def __init__(self, *args: Any, examples: Examples = (), **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.examples = examples

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write examples and groups."""
        _write_examples(self.examples, formatter)
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(parameter, "group", "Other"), []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


class Group(click.Group):
    """A group of commands whose help lists examples, and which shows it when called alone."""

    def __init__(self, *args: Any, examples: Examples = (), **kwargs: Any):
        super().__init__(*args, **{"invoke_without_command": True} | kwargs)
        self.examples = examples

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write examples, options and commands."""
        _write_examples(self.examples, formatter)
        super().format_options(ctx, formatter)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that was named, or show the help."""
        result = super().invoke(ctx)
        if ctx.invoked_subcommand is None:
            click.echo(ctx.get_help())
        return result


def _write_examples(examples: Examples, formatter: click.HelpFormatter) -> None:
    if examples:
        with formatter.section("Examples"):
            formatter.write_dl(examples, col_max=70)
