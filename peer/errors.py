"""The errors of this package, apart from SchemaError and SpecError: one line each, ending in the next step."""

from __future__ import annotations

import enum
import errno


class ExitStatus(enum.IntEnum):
    """Exit statuses of the command line; the numbers are part of the public face."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    NO_DAEMON = 3
    CONFIGURATION = 5
    UNREACHED = 6
    REFUSED = 7


class EquipoiseError(Exception):
    """Base of the errors that a user can do something about; the message is one line with a hint.

    Attributes:
        exit_status: Exit status of the command line.
        hint: The next step; empty if the message says it.
    """

    exit_status = ExitStatus.FAILURE

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message}; {hint}" if hint else message)
        self.hint = hint


class ConfigError(EquipoiseError, ValueError):
    """A setting is unknown or has a wrong type or value; names where it came from."""

    exit_status = ExitStatus.CONFIGURATION


class FlagError(ConfigError):
    """A setting that was given on the command line is wrong."""

    exit_status = ExitStatus.USAGE


class HomeError(EquipoiseError, OSError):
    """A directory cannot serve as the home of a daemon, or a file in it cannot be used."""

    exit_status = ExitStatus.CONFIGURATION


class DiskFull(HomeError):
    """No space is left for the home of a daemon."""

    exit_status = ExitStatus.FAILURE


class HomeBusy(HomeError):
    """Another daemon runs on this home."""

    exit_status = ExitStatus.FAILURE


class NoDaemon(EquipoiseError, ConnectionError):
    """No daemon answers on this home."""

    exit_status = ExitStatus.NO_DAEMON


class DaemonLost(EquipoiseError, ConnectionError):
    """The daemon ended or stopped answering; tensors and what was accumulated are untouched.

    A connection with `connect` is made again when a daemon is back on that home.
    """

    exit_status = ExitStatus.NO_DAEMON


class ControlError(EquipoiseError, ConnectionError):
    """The other end of the control socket speaks another version, or sent what cannot be understood."""


class Unwelcome(ControlError):
    """The daemon does not serve this client: it speaks another version, or has too many clients."""

    exit_status = ExitStatus.REFUSED


class Refused(EquipoiseError, ValueError):
    """The daemon refused a request."""

    exit_status = ExitStatus.REFUSED


class Lost(EquipoiseError, ConnectionError):
    """Nobody can say whether a message arrives: its receiver's script or daemon has gone, or this peer's."""


class Undecided(Lost, TimeoutError):
    """A message is not acknowledged in time; it is under way, and may be acknowledged later."""


class Unreached(EquipoiseError):
    """A daemon has ended without having met any of those that it was to join."""

    exit_status = ExitStatus.UNREACHED


class RoundPending(EquipoiseError, RuntimeError):
    """A round of this run has not been collected yet."""


_FULL = "free some space there, or give another --home"
_NEXT_STEPS = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EROFS: "give a --home that can be written",
    errno.EACCES: "give a --home that you may write, or correct its permissions",
    errno.EPERM: "give a --home that you may write, or correct its permissions",
    errno.ELOOP: "a daemon never makes a symbolic link there: look at it and remove it",
    errno.ENXIO: "a daemon never makes a pipe there: look at it and remove it",
}
"""Next step for the user, by the errno of a file of the home."""


def unusable(attempt: str, error: OSError) -> HomeError:
    """The error that says what cannot be done with which file of a home, why, and what to do next."""
    if isinstance(error, HomeError):
        return error
    kind = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else HomeError
    cause = (error.strerror or str(error)).lower()
    return kind(f"cannot {attempt}: {cause}", _NEXT_STEPS.get(error.errno or 0, "give another --home"))
