"""The command ``lp-jax``. Nothing beyond Python's own library is imported before it runs."""

import sys
from collections.abc import Sequence


def main(args: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0, or with one line on standard error 1 (failed), 2 (wrong use), 128 + signal.

    Args:
        args: what follows the command's name; that of the process if None.
    """
    args = list(sys.argv[1:] if args is None else args)
    try:
        import click

        from lp_jax.cli._app import app
    except ModuleNotFoundError as error:
        _exit(f"this needs {error.name}, of the extra lp_jax[train]: pip install 'lp_jax[train]'", 1)
    try:
        sys.exit(app.main(args, prog_name="lp-jax", standalone_mode=False) or 0)
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "lp-jax"
        _exit(f"{error.format_message()} (see {where} --help)", error.exit_code)
    except click.ClickException as error:
        _exit(error.format_message(), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _exit("interrupted; what was saved before is kept (--resume goes on from there)", 130)
    except ModuleNotFoundError as error:
        _exit(f"this needs {error.name}, of the extra lp_jax[train]: pip install 'lp_jax[train]'", 1)
    except Exception as error:
        if "--debug" in args:
            raise
        text = str(error) or type(error).__name__
        _exit(f"{text} (--debug shows where)", 1)


def _exit(message: str, code: int) -> None:
    print(f"lp-jax: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
