"""`equipoise demo`."""

from __future__ import annotations

import sys

import click

from equipoise.peer.cli.options import json_option


@click.command(short_help="Run a whole swarm on this machine.")
@click.option("--peers", default=4, show_default=True, help="Daemons, each with a trainer of its own.")
@click.option("--rounds", type=int, help="Updates that every trainer makes.")
@click.option(
    "--codec",
    default="",
    show_default="int8, and fp16 for gossip",
    help="How values travel: fp32, fp16, bf16 or int8.",
)
@click.option("--kill", default=0, show_default=True, metavar="K", help="SIGKILL K daemons half-way.")
@click.option(
    "--strategy", default="allreduce", show_default=True, help="Who meets whom: allreduce or gossip."
)
@json_option
def demo(peers: int, rounds: int | None, codec: str, kill: int, strategy: str, as_json: bool) -> None:
    """Run a whole swarm on this machine: real processes, real data, a minute or so.

    Each trainer has its own share of scikit-learn's handwritten digits. The summary compares the swarm with a peer that
    trains alone on its share. The exit status is 0 only if everything really worked.

    \b
    equipoise demo
    equipoise demo --peers 8 --codec fp32
    equipoise demo --kill 1
    equipoise demo --strategy gossip
    """
    from equipoise.peer.demo import DemoOptions, run_demo

    options = DemoOptions(peers=peers, codec=codec, kill=kill, strategy=strategy)
    if rounds is not None:
        options = DemoOptions(peers=peers, rounds=rounds, codec=codec, kill=kill, strategy=strategy)
    sys.exit(0 if run_demo(options, json=as_json).ok else 1)
