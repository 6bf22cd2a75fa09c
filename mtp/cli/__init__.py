"""The `mtp` command: thin commands over the packages, heavy imports inside them.

Exit codes: 0 success, 1 a broken input, a refused request or a failed check, 2 wrong usage,
143 ended by SIGTERM.
"""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

from graft.errors import UserError
from mtp import __version__
from mtp.cli.checkpoint import graft_command, probe_command, verify_command
from mtp.cli.data import data_app
from mtp.cli.extract import head_app
from mtp.cli.head import eval_command, train_command
from mtp.cli.inspect import inspect_command
from mtp.cli.nano import nano_app
from mtp.cli.plot import plot_command
from mtp.cli.quantize import quantize_command
from mtp.cli.release import release_app
from mtp.cli.ungraft import ungraft_command

app = typer.Typer(
    name="mtp",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Train a multi-layer MTP head for the model you serve, graft it in, prove that it runs.",
)
app.add_typer(data_app, name="data")
app.command("train")(train_command)
app.command("eval")(eval_command)
app.command("plot")(plot_command)
app.command("quantize")(quantize_command)
app.command("graft")(graft_command)
app.command("verify")(verify_command)
app.command("inspect")(inspect_command)
app.command("ungraft")(ungraft_command)
app.command("probe")(probe_command)
app.add_typer(head_app, name="head")
app.add_typer(release_app, name="release")
app.add_typer(nano_app, name="nano")


def main() -> None:
    """Run the command; a user's mistake is one line on stderr and exit code 1 or 2."""
    # As Ctrl-C does: what is half-made is removed. Training finishes its step first (mtp.progress).
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        app()
    except UserError as error:
        print(f"mtp: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:  # a full disk, a file that may not be read: nothing to trace
        if error.errno is None or isinstance(error, BrokenPipeError):
            raise
        name = f"{error.filename}: " if error.filename else ""
        print(f"mtp: {name}{error.strerror}", file=sys.stderr)
        sys.exit(1)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"mtp-graft {__version__}")
        raise typer.Exit()


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
