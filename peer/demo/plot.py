"""The plot of a federated demo: accuracy by round."""

from __future__ import annotations

import importlib

from equipoise.peer.demo.options import DemoOptions
from equipoise.peer.demo.summary import Summary


def write_plot(summary: Summary, options: DemoOptions) -> str:
    """Draw the accuracy of the swarm's model by round, beside that of a peer alone, into the file `options.plot`.

    Returns:
        One line that names the plot's file, or the reason for which no plot was written.
    """
    if not summary.curve:
        return "no plot: no round told an accuracy"
    try:
        figure = importlib.import_module("matplotlib.figure").Figure(figsize=(7, 4), layout="constrained")
    except ImportError:
        return "no plot: matplotlib is missing; install it: pip install 'equipoise[demo]'"
    axes = figure.subplots()
    rounds, accuracies = zip(*summary.curve, strict=True)
    axes.plot(rounds, [100 * one for one in accuracies], marker=".", label=f"{options.rule}, {options.outer}")
    axes.axhline(100 * summary.accuracy_alone, color="gray", linestyle="--", label="a peer alone, at its end")
    axes.set(xlabel="round", ylabel="test accuracy (%)", ylim=(0, 100))
    axes.set_title(f"{options.peers} peers, {options.strategy}, {options.split}", fontsize="medium")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    try:
        figure.savefig(options.plot)
    except OSError as error:
        return f"no plot: cannot write {options.plot}: {error.strerror}"
    return f"accuracy by round: {options.plot}"
