"""Why connections and credentials were refused, counted, so that `status` can tell."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Literal

from equipoise.dht.escaping import printable

Why = Literal[
    "malformed preface",
    "other version",
    "other peer",
    "not a member",
    "impostor",
    "expired",
    "replayed certificate",
    "malformed credential",
    "tls failure",
    "plain",
    "timeout",
    "too many",
    "went away",
]
"""`other peer`: it dialled somebody else than this peer. `impostor`: it does not hold the key it must hold. `replayed
certificate`: a credential that presents another peer's. `plain`: one side alone wants no encryption."""

_log = logging.getLogger(__name__)


class Refused(ConnectionError):
    """A connection is refused.

    Attributes:
        why: What it is counted as.
    """

    def __init__(self, why: Why, text: str) -> None:
        super().__init__(text)
        self.why: Why = why


class CredentialError(ValueError):
    """A credential is refused; the message says why, in one line.

    Attributes:
        why: What it is counted as.
    """

    def __init__(self, why: Why, text: str) -> None:
        super().__init__(text)
        self.why: Why = why


class Refusals:
    """Counts refusals by reason.

    Attributes:
        last: The latest in words; empty before there is one.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self.last = ""

    @property
    def counts(self) -> dict[str, int]:
        """How often each reason occurred."""
        return dict(self._counts)

    def note(self, why: Why, text: str) -> None:
        """Count one refusal."""
        self._counts[why] += 1
        self.last = printable(f"{why}: {text}")
        _log.info("refused: %s", self.last)
