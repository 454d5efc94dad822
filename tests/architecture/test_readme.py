"""Everything that README and the guides show is run against real daemons, and what they claim is looked up.

Blocks marked `console` are commands, `python` scripts, `toml` a daemon's configuration. ADDRESS stands for an address
of the first daemon. A block after the comment `<!-- elsewhere: ... -->` is run by another test.
"""

from __future__ import annotations

import difflib
import re
import shlex
import sys
from pathlib import Path

import pytest

from architecture.sources import ROOT
from architecture.test_guides import BLOCK, README
from e2e.swarm import CLI, ChildProcess, DaemonProcess, Swarm, eventually
from equipoise.averaging.advice import plan
from equipoise.dht.address import EXAMPLE
from equipoise.peer.cli.program import run
from equipoise.peer.errors import ExitStatus

STRANGER = EXAMPLE.rpartition("/")[2]

AVERAGED = re.compile(r"<Run '\w+', rounds: (?P<ok>\d+) ok.* contributors (?P<contributors>.*?);")
"""What `print(run)` says after a round that was ok."""

MAX_CHANGED_LINES = 6
"""What training together may take, of lines of a loop of plain PyTorch; indentation aside."""


def blocks(kind: str) -> list[str]:
    return [
        found["text"] for found in BLOCK.finditer(README) if found["kind"] == kind and not found["elsewhere"]
    ]


def commands() -> list[list[str]]:
    lines = [line for text in blocks("console") for line in text.splitlines()]
    return [shlex.split(line.removeprefix("$ ")) for line in lines if line.startswith("$ ")]


def shown(*words: str) -> list[str]:
    """The first command of the pages that begins with `equipoise WORDS`."""
    return next(one for one in commands() if one[1 : 1 + len(words)] == list(words))


def script(name: str) -> str:
    """The Python block whose first line is the comment `name`, or the only one without a name."""
    named = {text.splitlines()[0].removeprefix("# "): text for text in blocks("python")}
    return named.get(name) or next(text for first, text in named.items() if not first.endswith(".py"))


def test_every_command_is_one_that_the_story_runs() -> None:
    verbs = [
        "daemon",
        "daemon",
        "launch",
        "plan",
        "status",
        "peers",
        "rounds",
        "rounds",
        "stop",
        "daemon",
        "daemon",
        "launch",
        "ban",
        "allow",
    ]
    private = ["swarm", "daemon", "swarm", "swarm", "swarm"]
    assert [words[1] for words in commands()] == [*verbs, *private]
    assert {words[0] for words in commands()} == {"equipoise"}


def test_two_daemons_and_a_look_inside(swarm: Swarm) -> None:
    first = swarm.daemon("first")
    second = swarm.daemon("second", join=told(shown("daemon", "--join")[3:], first))
    for verb in ("status", "peers", "rounds"):
        for words in (one[1:] for one in commands() if one[1] == verb):
            done = second.cli(*words)
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip()
        second.json(verb)
    assert second.cli(*shown("stop")[1:]).returncode == 0
    assert second.wait() == 0


def test_a_private_swarm_without_its_daemon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in commands()[-7:]:
        words = [STRANGER if word == "PEERID" else word for word in words[1:]]
        looks = ["--show-config"] if words[0] == "daemon" else []
        assert run([*words, *looks, "--home", str(tmp_path)]) == ExitStatus.OK, capsys.readouterr().err


def test_the_plan_is_that_of_the_table() -> None:
    assert run(shown("plan")[1:]) == ExitStatus.OK
    table = README[README.index("| parameters") :].partition("\n\n")[0]
    head, _, *rows = (line.strip("| ") for line in table.splitlines())
    rates = [float(word.split()[0]) for word in head.split(" | ")[1:]]
    for row in rows:
        size, *cells = row.split(" | ")
        parameters = int(size[:-1]) * {"M": 10**6, "B": 10**9}[size[-1]]
        for mbit, cell in zip(rates, cells, strict=True):
            found = plan(parameters, 8, mbit * 1e6 / 8, mbit * 1e6 / 8, 1.0, ("int8", "nf4"))
            assert [float(word) for word in cell.split(" / ")] == [
                pytest.approx(one.seconds, rel=0.05) for one in found
            ]


def test_every_script_averages_on_two_machines(swarm: Swarm) -> None:
    launch, resume = shown("launch", "--join"), shown("launch", "--resume")
    first = swarm.daemon("first")
    names = (
        *(
            "train.py",
            "local.py",
            "gossip.py",
            "population.py",
            "pipeline.py",
            "messages.py",
            "shared.py",
            "curves.py",
            "shares.py",
        ),
        *("by_hand.py", "federated.py"),
    )
    for name in names:
        (swarm.folder / name).write_text(script(name))
    each = "\n".join(f"runpy.run_path({str(swarm.folder / name)!r}, run_name='__main__')" for name in names)
    (swarm.folder / "each.py").write_text(f"import runpy\n{each}\n")
    beside = {"EQUIPOISE_HOME": str(first.home)}
    for command, count in [(launch, 1), (with_script(resume, "each.py"), 7)]:
        trainer = launched(swarm, told(command, first), str(count))
        other = swarm.script(swarm.folder / command[-1], env=beside)
        for one in (trainer, other):
            assert one.wait(120) == 0, one.errors
            assert one.output.count("epoch 5: ") == 1
        assert_averaged([trainer, other], count)
        beside["EQUIPOISE_RESUME"] = "1"


def test_the_doors_of_a_daemon(swarm: Swarm) -> None:
    doors, relay = [
        [re.sub(r"/tcp/\d+$", "/tcp/0", word) for word in words[2:]]  # Another test may have taken the ports.
        for words in (shown("daemon", "--listen"), next(one for one in commands() if "--relay" in one))
    ]
    assert swarm.daemon("doors", args=doors).json("status")["swarm"]["direct"]["listening"]
    settings = {one["key"]: one for one in swarm.daemon("relay", args=relay).json("status")["settings"]}
    assert (settings["relay"]["value"], settings["relay_bandwidth"]["value"]) == (True, 5e6)


def test_the_daemon_within_a_script(swarm: Swarm) -> None:
    first = swarm.daemon("first")
    code = script("the daemon within").replace("ADDRESS", first.address)
    process = swarm.script(f"import os; os.chdir({str(swarm.folder)!r})\n{code}")
    assert process.wait(60) == 0, process.errors
    assert process.output.strip()


def test_the_simulation(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(script("simulated.py"), "simulated.py", "exec"), {})
    assert capsys.readouterr().out == "True\n"


def test_the_configuration(swarm: Swarm) -> None:
    first = swarm.daemon("first")
    (text,) = blocks("toml")
    home = swarm.folder / "second"
    home.mkdir(mode=0o700)
    (home / "config.toml").write_text(text.replace("ADDRESS", first.address).replace(":9464", ":0"))
    second = swarm.daemon("second")
    eventually(lambda: second.json("status")["swarm"]["state"] == "joined", "joining through config.toml")
    settings = {setting["key"]: setting for setting in second.json("status")["settings"]}
    assert settings["name"]["value"] == "gpu-box"
    assert "config.toml" in settings["name"]["origin"]


def test_training_together_takes_few_changes() -> None:
    source = (ROOT / "scripts" / "text_loops.py").read_text()
    plain, together = [
        [
            line.strip()
            for line in re.findall(rf"^def {name}\(.*?(?=^def |\Z)", source, re.M | re.S)[0].splitlines()[2:]
            if line
        ]
        for name in ("plain", "target_batch")
    ]
    changed = [line for line in difflib.ndiff(plain, together) if line[:2] in ("+ ", "- ")]
    imported = ["+ from equipoise.peer import connect"]
    assert imported[0][2:] in source.splitlines()
    (diff,) = blocks("diff")
    marked = [f"{line[0]} {line[1:].strip()}" for line in diff.splitlines() if line[0] in "+-"]
    assert sorted(marked) == sorted(imported + changed)
    assert len(marked) <= MAX_CHANGED_LINES


def assert_averaged(trainers: list[ChildProcess], count: int) -> None:
    """Each said of each of so many scripts that a round was ok, and who contributed: the same two peers."""
    contributors = []
    for trainer in trainers:
        said = list(AVERAGED.finditer(trainer.output))
        assert len(said) == count, f"a script without an ok round:\n{trainer.output}{trainer.errors}"
        assert all(int(one["ok"]) >= 1 for one in said)
        contributors.append([sorted(re.findall(r"\.\.\.(\w+): ", one["contributors"])) for one in said])
    assert all(len(peers) == len(trainers) for peers in contributors[0])
    assert all(one == contributors[0] for one in contributors)


def with_script(words: list[str], name: str) -> list[str]:
    return [*words[: words.index("python") + 1], name]


def told(words: list[str], first: DaemonProcess) -> list[str]:
    return [first.address if word == "ADDRESS" else word for word in words]


def launched(swarm: Swarm, words: list[str], log: str) -> ChildProcess:
    """The command as told, with a home of its own and `equipoise` and `python` those of this environment."""
    home = swarm.folder / "launched"
    command = [*CLI, *words[1:]]
    command[command.index("python")] = sys.executable
    process = ChildProcess(command, swarm.folder / log, {**swarm.env, "EQUIPOISE_HOME": str(home)})
    swarm.processes.append(process)
    process.spawn(swarm.folder)
    return process
