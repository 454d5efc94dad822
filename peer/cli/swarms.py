"""The verbs of private swarms: `swarm create`, `invite`, `revoke` and `show`, and `join`."""

from __future__ import annotations

import importlib
import os
import secrets
import time
from pathlib import Path
from typing import Any, NoReturn

import click

from equipoise.dht.admission import ROLES, Link
from equipoise.dht.identity import public_key_of
from equipoise.dht.membership import Membership, names, revoked_by
from equipoise.peer.cli import output
from equipoise.peer.cli.verbs import ask, daemon_options, home_option, json_option
from equipoise.peer.config import find_home, load
from equipoise.peer.control.messages import AskStatus, Revoke
from equipoise.peer.daemon import run_daemon
from equipoise.peer.errors import ConfigError, EquipoiseError, NoDaemon

DAY_SECONDS = 86_400
MAX_DAYS = 3650

name_option = click.option(
    "--swarm", "name", metavar="NAME", help="Which swarm, if the home is in several and no daemon runs on it."
)


@click.group(short_help="Make a private swarm, and invite to it.")
def swarm() -> None:
    """Make a private swarm, which only the invited enter; invite, and revoke.

    \b
    equipoise swarm create friends
    equipoise daemon --swarm friends
    equipoise swarm invite          prints a line, for: equipoise join LINE
    """


@swarm.command()
@click.argument("name")
@home_option
def create(name: str, home: str | None) -> None:
    """Make the key of a swarm in this home, whose daemon is its first member."""

    place = _home(home)
    try:
        made = Membership.create(place, name, time.time())
    except ConnectionError as error:
        raise ConfigError(str(error)) from error
    click.echo(f"made swarm {name} ({made.token.swarm.hex()}); its key is in {made.folder}: keep a copy")
    click.echo(f"next: equipoise daemon --swarm {name}, then: equipoise swarm invite")


@swarm.command()
@click.option(
    "--days", type=click.IntRange(1, MAX_DAYS), default=30, show_default=True, help="Days that it lasts."
)
@click.option("--for", "guest", metavar="PEERID", help="Admit this PeerID only.  [default: who has the line]")
@click.option(
    "--role", type=click.Choice(ROLES), default="trainer", show_default=True, help="What the guest may do."
)
@click.option("--may-invite", is_flag=True, help="The guest may invite others, once removed.")
@click.option("--qr", is_flag=True, help="Print it as a QR code too; needs the package segno.")
@name_option
@home_option
def invite(
    days: int, guest: str | None, role: Any, may_invite: bool, qr: bool, name: str | None, home: str | None
) -> None:
    """Print an invitation, one line; it is a secret, and best given to one person.

    Nobody is asked when it is used. Everybody who has the line may come in by it until it ends or is revoked.
    """

    addresses, issuer = _addresses(home, name), _membership(home, name)
    end = int(time.time()) + days * DAY_SECONDS
    try:
        only = public_key_of(guest) if guest else b""
        made = issuer.invite(Link(b"", role, end, only, may_invite), secrets.token_bytes(32), addresses)
    except (ConnectionError, ValueError) as error:
        raise EquipoiseError(str(error)) from error
    if not addresses:
        told = f"no daemon of swarm {issuer.name} runs here, so the line has no address"
        click.echo(f"warning: {told}: start one, or have the guest add --join ADDRESS", err=True)
    click.echo(made.line)
    click.echo(f"invitation {made.links[-1].id}, {role}, {days} days", err=True)
    if qr:
        _print_qr(made.line)


@swarm.command()
@click.argument("target", metavar="PEERID_OR_INVITATION")
@name_option
@home_option
def revoke(target: str, name: str | None, home: str | None) -> None:
    """Revoke a peer and the invitation by which it came, or an invitation and all who came by it.

    The home must hold the swarm's key. Its daemon tells the others at once; without a daemon they learn it when one
    starts, and the invitation of a peer has to be revoked by its own name.
    """

    try:
        revoked: tuple[str, ...] = ask(home, Revoke(target))
    except NoDaemon:
        member = _membership(home, name)
        try:
            revoked = tuple(revoked_by(target, ()))
            member.revoke(revoked)
        except ConnectionError as error:
            raise EquipoiseError(str(error)) from error
        click.echo("no daemon runs here: others learn it when one starts", err=True)
    click.echo(f"revoked {', '.join(revoked)}; other peers that joined by that invitation need a new one")


@swarm.command()
@name_option
@home_option
@json_option
def show(name: str | None, home: str | None, as_json: bool) -> None:
    """Show the private swarms of this home: key, role, end, and who was revoked."""

    found = [_told(home, one) for one in ([name] if name else names(_home(home)))]
    if as_json:
        output.print_json(found)
        return
    for one in found or [{"swarms": "none; make one with equipoise swarm create NAME, or join one"}]:
        click.echo("\n".join(f"{key}: {value}" for key, value in one.items()))


@click.command(short_help="Join a private swarm by an invitation.")
@click.argument("line")
@daemon_options
def join(line: str, **flags: Any) -> None:
    """Join a private swarm by an invitation's LINE, keep it in the home, and run the daemon in the foreground.

    From then on: equipoise daemon --swarm NAME, or swarm = "NAME" in config.toml.
    """
    run_daemon.run_daemon(load({**flags, "invite": line}))


def _home(home: str | None) -> Path:
    return find_home(home, os.environ)[0]


def _addresses(home: str | None, name: str | None) -> tuple[str, ...]:
    """The addresses of the daemon on this home, if it is in the swarm."""
    try:
        found = ask(home, AskStatus()).swarm
    except NoDaemon:
        return ()
    return found.addresses if found.name and found.name == (name or found.name) else ()


def _membership(home: str | None, name: str | None) -> Membership:
    """The membership that is meant."""

    place = _home(home)
    known = names(place)
    if name is None and len(known) > 1:
        try:
            name = ask(home, AskStatus()).swarm.name or None
        except NoDaemon:
            name = None
    if name is None and len(known) != 1:
        _unclear(known)
    try:
        return Membership.load(place, name or known[0], time.time())
    except ConnectionError as error:
        raise ConfigError(str(error)) from error


def _unclear(known: list[str]) -> NoReturn:
    if known:
        raise ConfigError(f"this home is in the swarms {', '.join(known)}", "say which with --swarm NAME")
    raise ConfigError("this home is in no private swarm", "make one with: equipoise swarm create NAME")


def _told(home: str | None, name: str) -> dict[str, Any]:
    member = _membership(home, name)
    return {
        "name": name,
        "key": member.token.swarm.hex(),
        "founder": (member.folder / f"{name}.key").exists(),
        "role": member.token.role,
        "until": member.token.end,
        "invitation": member.token.links[-1].id,
        "revoked": sorted(member.revocations.ids),
    }


def _print_qr(line: str) -> None:
    try:
        segno = importlib.import_module("segno")
    except ImportError:
        raise EquipoiseError("the QR code needs the package segno", "pip install segno") from None
    segno.make(line, error="l").terminal(compact=True)
