"""What this package raises, apart from SchemaError and SpecError: one line each, ending in what to do next."""

from __future__ import annotations


class EquipoiseError(Exception):
    """Base of the errors that a user can do something about; the message is one line with a hint.

    Attributes:
        exit_status: What the command line exits with: 2 for wrong usage, 1 otherwise.
    """

    exit_status = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message}; {hint}" if hint else message)


class ConfigError(EquipoiseError, ValueError):
    """A setting is unknown or has a wrong type or value; names where it came from."""

    exit_status = 2


class HomeError(EquipoiseError, OSError):
    """A directory cannot serve as the home of a daemon."""


class HomeBusy(HomeError):
    """Another daemon runs on this home."""


class NoDaemon(EquipoiseError, ConnectionError):
    """No daemon answers on this home."""


class DaemonLost(EquipoiseError, ConnectionError):
    """The daemon ended or stopped answering; tensors and what was accumulated are untouched."""


class ControlError(EquipoiseError, ConnectionError):
    """The other end of the control socket speaks another version, or sent what cannot be understood."""


class Refused(EquipoiseError, ValueError):
    """The daemon refused a request."""


class RoundPending(EquipoiseError, RuntimeError):
    """A round of this run has not been collected yet."""
