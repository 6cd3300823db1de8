"""The frame of the command line: errors as one line with the exit status of their kind, shared options, and ways to
print."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from optpipe.errors import InputError, OptPipeError

if TYPE_CHECKING:
    from rich.console import Console

CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}
_DEBUG = "optpipe.debug"
_INTERRUPTED = 130
#: What a write can fail with through no fault of ours.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class Front(click.Group):
    """A group whose errors are one line on stderr, with the exit status of their kind."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; a failure becomes one line, with a traceback under ``--debug`` only."""
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.ClickException, click.Abort, KeyboardInterrupt, BrokenPipeError):
            raise
        except Exception as error:
            if ctx.meta.get(_DEBUG):
                traceback.print_exc()
            if isinstance(error, OptPipeError):
                _fail(_one_line(error), error.exit_code)
            if isinstance(error, OSError) and error.filename is None and error.errno in _NO_ROOM:
                _drop_output()
                _fail(f"the output cannot be written: {error.strerror}", 1)
            _fail(f"{type(error).__name__}: {_flat(str(error))} (a fault of OptPipe; --debug shows where)", 1)

    def main(self, args: Sequence[str] | None = None, *_: Any, **extra: Any) -> Any:
        """As click's, with its messages cut to one line."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # a terminal without the character shows a question mark
        extra["prog_name"] = "optpipe"
        standalone = extra.pop("standalone_mode", True)
        try:
            status = super().main(args, standalone_mode=False, **extra)
        except (click.ClickException, click.Abort, KeyboardInterrupt, BrokenPipeError) as error:
            if not standalone:
                raise
            _end(error)
        if not standalone:
            return status
        sys.exit(status if isinstance(status, int) else 0)


def _end(error: BaseException) -> NoReturn:
    """Say in one line how a command ended, and end with the status of that."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message(), err=True)
        sys.exit(error.exit_code)
    if isinstance(error, click.UsageError):
        path = error.ctx.command_path if error.ctx else "optpipe"
        _fail(f"{path}: {_flat(error.format_message()).rstrip('.')} (see '{path} --help')", error.exit_code)
    if isinstance(error, click.ClickException):
        _fail(_flat(error.format_message()), error.exit_code)
    if isinstance(error, BrokenPipeError):
        _drop_output()  # the reader (head, less) has gone
        sys.exit(1)
    _fail("interrupted", _INTERRUPTED)


def _drop_output() -> None:
    """No more output, and none at the interpreter's end either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Number(click.FloatRange):
    """A finite number of at least ``min``."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; NaN and infinities are refused."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


def _flat(text: str) -> str:
    return " ".join(text.split())


def _one_line(error: OptPipeError) -> str:
    text = _flat(str(error))
    budget = getattr(error, "smallest_budget", None)
    if budget and not any(str(size) in text for size in set(budget)):
        sizes = str(budget[0]) if len(set(budget)) == 1 else ", ".join(map(str, budget))
        text += f"; the smallest budget that works is {sizes} bytes a device"
    return text


def _fail(message: str, status: int) -> NoReturn:
    click.echo(f"Error: {message}", err=True)
    sys.exit(status)


def _set_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[_DEBUG] = True


debug_option = click.option(
    "--debug", is_flag=True, expose_value=False, callback=_set_debug, help="Show the traceback of an error."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")


def plain_console(width: int = 200) -> Console:
    """Plain output: tables take the width they need, and a narrow terminal wraps them itself. Names and paths stand in
    it as they are, brackets and colons are no markup."""
    from rich.console import Console

    return Console(width=width, highlight=False, soft_wrap=True, markup=False, emoji=False)


@contextlib.contextmanager
def working(message: str) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr while something long runs, on a terminal only. Yields what changes its text."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status(message) as status:
        yield lambda text: status.update(f"{message} {text}")


def check_output(path: str) -> None:
    """Refuse, before anything long begins, a place where nothing can be written."""
    target = Path(path)
    try:
        if target.is_dir():
            raise InputError(path, "", "cannot be written: it is a folder")
        if target.exists() and not target.is_file():
            raise InputError(path, "", "cannot be written: it is no regular file")
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise InputError(path, "", f"cannot be written: {error.strerror}") from None
    if not os.access(target.parent, os.W_OK):
        raise InputError(path, "", f"cannot be written: no folder {target.parent} that can be written to")


def print_json(value: Any) -> None:
    """Print a value as one line of JSON."""
    click.echo(json.dumps(value, allow_nan=False))
