"""The verbs that say whom a daemon lets in: `swarm create`, `invite`, `revoke` and `show`, `join`, `ban`, `allow`."""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import time
from pathlib import Path
from typing import Any

import click

from equipoise.dht import membership
from equipoise.dht.admission import MAX_END, ROLES, Link
from equipoise.dht.identity import public_key_of
from equipoise.dht.membership import Membership, revoked_by
from equipoise.dht.options import FOLDER, names
from equipoise.peer.cli import output
from equipoise.peer.cli.verbs import ask, daemon_options, home_option, json_option
from equipoise.peer.config import find_home, load
from equipoise.peer.control.messages import AskStatus, Ban, Revoke
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
    made = Membership.create(_home(home), name)
    place = _home(home) / FOLDER / name
    click.echo(f"made swarm {name} ({made.invitation.swarm.hex()}); its key is in {place}: keep a copy")
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
    link = Link(bytes(32), role, end, public_key_of(guest) if guest else b"", may_invite)
    made = issuer.invite(link, secrets.token_bytes(32), addresses)
    if not addresses:
        told = f"no daemon of swarm {made.name} runs here, so the line has no address"
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
        revoked = tuple(revoked_by(target, ()))
        member.revoke(_home(home), revoked)
        click.echo("no daemon runs here: others learn it when one starts", err=True)
    click.echo(f"revoked {', '.join(revoked)}; other peers that joined by that invitation need a new one")


@swarm.command()
@name_option
@home_option
@json_option
def show(name: str | None, home: str | None, as_json: bool) -> None:
    """Show the private swarms of this home: key, role, end, and who was revoked."""

    found = []
    for one in [name] if name else names(_home(home)):
        member = _membership(home, one)
        link = member.invitation.links[-1]
        told = {
            "name": one,
            "key": member.invitation.swarm.hex(),
            "founder": bool(member.key),
            "role": link.role,
        }
        found.append({**told, "until": link.end, "invitation": link.id, "revoked": member.revocations.ids})
    if as_json:
        output.print_json(found)
        return
    for shown in found or [{"swarms": "none; make one with equipoise swarm create NAME, or join one"}]:
        click.echo("\n".join(f"{key}: {_plain(value)}" for key, value in shown.items()))


@click.command(short_help="Join a private swarm by an invitation.")
@click.argument("line")
@daemon_options
def join(line: str, **flags: Any) -> None:
    """Join a private swarm by an invitation's LINE, keep it in the home, and run the daemon in the foreground.

    From then on: equipoise daemon --swarm NAME, or swarm = "NAME" in config.toml.
    """
    run_daemon.run_daemon(load({**flags, "invite": line}))


@click.command(short_help="Refuse a peer, here only.")
@click.argument("peer", metavar="PEERID")
@click.option("--reason", default="", metavar="TEXT", help="Why, for `equipoise peers`.")
@home_option
def ban(peer: str, reason: str, home: str | None) -> None:
    """Have the daemon of this home refuse a peer, in every run and swarm, until `equipoise allow PEERID`.

    Others are not told: a group that one of them forms with that peer is formed without this daemon.
    """
    _decide(home, Ban(peer, reason))
    click.echo(f"banned {peer}; to lift it: equipoise allow {peer}")


@click.command(short_help="Refuse a banned peer no longer.")
@click.argument("peer", metavar="PEERID")
@home_option
def allow(peer: str, home: str | None) -> None:
    """Lift the ban of a peer."""
    _decide(home, Ban(peer, None))
    click.echo(f"{peer} is not banned any more")


def _decide(home: str | None, decision: Ban) -> None:
    """Have the daemon of the home keep a decision, or keep it for the next one."""
    try:
        ask(home, decision)
    except NoDaemon:
        membership.ban(_home(home), decision.peer, decision.reason)


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
    known = names(_home(home))
    if name is None and len(known) > 1:
        with contextlib.suppress(NoDaemon):
            name = ask(home, AskStatus()).swarm.name or None
    if not known:
        raise ConfigError("this home is in no private swarm", "make one with: equipoise swarm create NAME")
    if name is None and len(known) > 1:
        raise ConfigError(f"this home is in the swarms {', '.join(known)}", "say which with --swarm NAME")
    return Membership.load(_home(home), name or known[0], time.time())


def _print_qr(line: str) -> None:
    try:
        segno = importlib.import_module("segno")
    except ImportError:
        raise EquipoiseError("the QR code needs the package segno", "pip install segno") from None
    segno.make(line, error="l").terminal(compact=True)


def _plain(value: Any) -> str:
    """A value of `swarm show` for people; an `until` is in seconds since 1970."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return "no end" if value == MAX_END else time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(value))
    return value if isinstance(value, str) else ", ".join(value) or "nobody"
