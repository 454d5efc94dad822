"""Options that several verbs share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

_HOME = "Directory of identity, control socket and log.  [env: EQUIPOISE_HOME; default: the user's data directory]"


def home_option(command: Command) -> Command:
    """`--home DIR`."""
    return click.option("--home", metavar="DIR", type=click.Path(), help=_HOME)(command)


def json_option(command: Command) -> Command:
    """`--json`, as the argument `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")(command)
