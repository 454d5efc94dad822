"""What it costs to start a daemon that waits for a run: processor time to its first address, and resident memory.

    .venv/bin/python scripts/bench_start.py --times 5 --beside OTHER_CHECKOUT

Checkouts take turns. p2pd, a process of its own, is not counted.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import click
import psutil

SETTLE_SECONDS = 1.0
"""Time from the first address to the look at memory, in which a daemon has no more to do."""

END_SECONDS = 20.0


@click.command(help=__doc__)
@click.option("--times", default=5, show_default=True, help="Starts of each checkout.")
@click.option("--beside", type=click.Path(exists=True, path_type=Path), multiple=True)
def main(times: int, beside: tuple[Path, ...]) -> None:
    checkouts = (Path(__file__).resolve().parents[1], *beside)
    found: dict[Path, list[tuple[float, float]]] = {checkout: [] for checkout in checkouts}
    for _ in range(times):
        for checkout, costs in found.items():
            with tempfile.TemporaryDirectory() as home:
                costs.append(cost(checkout, Path(home)))
    for checkout, costs in found.items():
        seconds, megabytes = zip(*costs, strict=True)
        click.echo(
            f"{checkout}: {min(seconds):.2f} / {statistics.median(seconds):.2f} s of processor time, "
            f"{min(megabytes):.0f} / {statistics.median(megabytes):.0f} MB (min / median of {times})"
        )


def cost(checkout: Path, home: Path) -> tuple[float, float]:
    """Processor seconds and resident MB of one daemon."""
    program = str(checkout / ".venv/bin/equipoise")
    words = [program, "daemon", "--home", str(home), "--listen", "/ip4/127.0.0.1/tcp/0"]
    daemon = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=home.parent)
    assert daemon.stdout is not None, "a pipe"
    try:
        if not any("/p2p/" in line for line in daemon.stdout):
            raise click.ClickException(f"the daemon of {checkout} ended before it had an address")
        process = psutil.Process(daemon.pid)
        used = process.cpu_times()
        time.sleep(SETTLE_SECONDS)
        return used.user + used.system, process.memory_info().rss / 1e6
    finally:
        daemon.terminate()
        daemon.wait(END_SECONDS)


if __name__ == "__main__":
    main()
