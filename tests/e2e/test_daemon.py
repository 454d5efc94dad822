"""Daemons as processes: addresses in files, crashes on either side, signals, and what is left afterwards."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from contracts.run import together
from e2e.swarm import DaemonProcess, Swarm, eventually
from equipoise.peer import DaemonLost, NoPeers, connect
from equipoise.peer.control.messages import Hello, encode
from equipoise.peer.home import Home, wait_until_free

LOCAL = ["--listen", "/ip4/127.0.0.1/tcp/0"]

OPTIONS: dict[str, Any] = {"codec": "fp32", "group_size": 4}

HEAVY = {"torch", "grpc", "pandas", "sklearn"}
"""Libraries that a daemon does without."""

NUMBA = {"numba", "llvmlite", "scipy"}
"""Libraries that it loads for numba's kernels only."""

HIVEMIND = tuple(f"hivemind.{part}" for part in ("averaging", "compression", "moe", "optim", "utils.tensor"))
"""The parts of hivemind that need torch."""

REPORTING = """
import atexit, os, sys
os.environ["EQUIPOISE_KERNELS"] = "{kernels}"
atexit.register(lambda: print("modules", *sys.modules, flush=True))
from equipoise.peer.cli import main
main()
"""
"""`equipoise`, which names at its end the modules that it has loaded."""

TRAINER = """
import sys, torch
from equipoise.peer import connect
peer = connect(sys.argv[1])
run = peer.join("digits", [torch.zeros(1_000_000)], codec="fp32")
print("joined", flush=True)
run.average(timeout=600)
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon that no test stops or breaks."""
    swarm = Swarm(tmp_path_factory.mktemp("shared"))
    yield swarm.daemon(args=[*LOCAL, "--upload", "5e6", "--tag", "gpu", "--tag", "a100"])
    assert not swarm.close()


@pytest.fixture
def daemon(swarm: Swarm) -> DaemonProcess:
    return swarm.daemon("first", args=LOCAL)


# ---- addresses in files ----


def test_a_malformed_address_in_the_file_is_a_state_and_no_exit(daemon: DaemonProcess) -> None:
    daemon.stop()
    (daemon.home / "config.toml").write_text('join = ["nonsense"]')

    daemon.start()

    swarm = daemon.json("status")["swarm"]
    assert [(row["address"], row["state"]) for row in swarm["bootstrap"]] == [("nonsense", "malformed")]
    assert "malformed address 'nonsense'" in swarm["reason"]
    assert swarm["state"] == "searching"


# ---- what people and programs see ----


def test_show_config(shared: DaemonProcess) -> None:
    done = shared.cli("daemon", "--show-config", "--name", "gpu-box", "--json")

    settings = {setting["key"]: setting for setting in json.loads(done.stdout)}
    assert settings["name"] == {"key": "name", "value": "gpu-box", "origin": "flag --name"}
    assert settings["log_level"]["origin"] == "default"


def test_every_verb_prints_for_people_and_programs(shared: DaemonProcess) -> None:
    with connect(shared.home) as client, client.join("digits", [torch.zeros(2)], **OPTIONS) as run:
        run.average(timeout=0.1)
        eventually(client.peers, "itself in the directory")

        assert shared.json("status")["runs"][0]["state"]["type"] == "NoPeers"
        (row,) = shared.json("peers")
        assert (row["me"], row["bandwidth"], row["tags"]) == (True, 5e6, ["a100", "gpu"])
        outcome = shared.json("rounds")[-1]
        assert not outcome["ok"]
        assert outcome["reason"].startswith("no group")
        for verb in ("status", "peers", "rounds"):
            done = shared.cli(verb)
            assert done.returncode == 0
            assert "digits" in done.stdout
            assert done.stderr == ""
    assert shared.json("rounds")[-1] == outcome, "rounds outlive their script"


# ---- the control socket ----


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_is_refused_even_where_the_files_let_it_in(swarm: Swarm) -> None:
    with tempfile.TemporaryDirectory(prefix="equipoise-test-") as folder:
        Path(folder).chmod(0o711)
        daemon = DaemonProcess(Path(folder) / "home", swarm.env, args=LOCAL)
        swarm.processes.append(daemon)
        daemon.start()
        daemon.home.chmod(0o711)
        (daemon.home / "control.sock").chmod(0o666)
        refuse_stranger(swarm, daemon)
        daemon.stop()


def refuse_stranger(swarm: Swarm, daemon: DaemonProcess) -> None:
    code = (
        "import os, socket, sys; s = socket.socket(socket.AF_UNIX); os.setuid(12345); s.connect(sys.argv[1]);"
        "print('connected'); s.sendall(bytes.fromhex(sys.argv[2])); s.recv(1) and print('answered')"
    )
    hello = encode(1, Hello(1, "stranger")).hex()

    stranger = swarm.script(code, str(daemon.home / "control.sock"), hello)

    stranger.wait()
    assert stranger.output == "connected\n", stranger.errors
    assert "refused uid 12345" in (daemon.home / "daemon.log").read_text()


# ---- crashes ----


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_call_ends_in_time_when_the_daemon_does_not_answer(daemon: DaemonProcess, number: int) -> None:
    with connect(daemon.home) as client:
        tensor = torch.ones(1000)
        run = client.join("digits", [tensor], **OPTIONS)
        run.accumulate([torch.ones(1000)], weight=3)
        pending = run.average(timeout=2, wait=False)
        daemon.signal(number)

        outcome = pending.result()

        assert not outcome
        assert ("was killed" if number == signal.SIGKILL else "has not answered for") in outcome.reason
        assert torch.equal(tensor, torch.ones(1000))
        assert run.accumulated == 3.0
        assert not run.step()
        assert run.progress().swarm == 3.0
        next_step = "start it with: equipoise daemon" if number == signal.SIGKILL else "kill -CONT"
        with pytest.raises(DaemonLost, match=next_step):
            client.status()
        assert run.accumulated == 3.0


def test_a_forked_child_does_not_keep_a_dead_script_alive(swarm: Swarm, shared: DaemonProcess) -> None:
    code = "import os, signal\n" + TRAINER.replace("run.average", "os.fork() or signal.pause()\nrun.average")
    trainer = swarm.script(code, str(shared.home))
    eventually(lambda: trainer.descendants(), "the child")
    (child,) = trainer.descendants()

    trainer.kill()

    eventually(lambda: shared.json("status")["runs"] == [], "the end of its run")
    assert child.is_running()
    child.kill()


# ---- what it loads ----


def test_a_daemon_that_has_averaged_has_not_loaded_torch(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    kernels, daemons = ("numpy", "numba"), list[DaemonProcess]()
    for name in kernels:
        code = REPORTING.format(kernels=name.replace("numpy", "torch"))
        monkeypatch.setattr("e2e.swarm.CLI", (sys.executable, "-c", code))
        daemons.append(swarm.daemon(join=[one.address for one in daemons], args=LOCAL))
    tensors = [torch.full((100_000,), float(value)) for value in (1, 3)]
    with connect(daemons[0].home) as one, connect(daemons[1].home) as other:
        runs = [
            peer.join("digits", [tensor], codec="int8")
            for peer, tensor in zip((one, other), tensors, strict=True)
        ]
        assert runs[0].wait_for(1)
        outcomes = together(*(lambda run=run: run.average(timeout=60) for run in runs))
        assert all(outcome.ok for outcome in outcomes), outcomes
        assert tuple(peer.status().kernels.name for peer in (one, other)) == kernels
    for daemon, name in zip(daemons, kernels, strict=True):
        assert daemon.stop() == 0
        (told,) = [line for line in daemon.output.splitlines() if line.startswith("modules ")]
        loaded = set(told.split())
        assert "equipoise.averaging.aio.round_driver" in loaded
        assert not loaded & HEAVY
        assert bool(loaded & NUMBA) == (name == "numba")
        assert not [module for module in loaded if module.startswith(HIVEMIND)]
    assert all(torch.equal(tensor, torch.full((100_000,), 2.0)) for tensor in tensors)


# ---- the end ----


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_gracefully(daemon: DaemonProcess, number: int) -> None:
    with connect(daemon.home) as client:
        run = client.join("digits", [torch.zeros(2)], **OPTIONS)
        pending = run.average(timeout=60, wait=False)
        assert isinstance(run.state, NoPeers)

        daemon.signal(number)

        assert daemon.wait() == 0
        outcome = pending.result()
        assert not outcome.ok
        assert outcome.reason
    assert {path.name for path in daemon.home.iterdir()} <= {
        "daemon.log",
        "daemon.pid",
        "identity.key",
        "rounds.jsonl",
        "swarm.json",
    }
    assert "stopping: signal" in daemon.output
    assert daemon.errors == ""


def test_launch_passes_signals_on_and_whether_to_resume(swarm: Swarm) -> None:
    code = (
        "import os, signal, sys\nsignal.signal(15, lambda *_: sys.exit(9))\n"
        "print(os.environ['EQUIPOISE_RESUME'], flush=True)\nsignal.pause()"
    )
    home = str(swarm.folder / "home")
    launched = swarm.command("launch", "--resume", "--home", home, *LOCAL, "--", sys.executable, "-c", code)
    eventually(lambda: launched.output.endswith("\n"), "the script")
    assert launched.output == "1\n"

    launched.signal(signal.SIGTERM)

    assert launched.wait() == 9
    assert "Traceback" not in launched.errors


def test_launch_runs_a_script_with_a_daemon_and_starts_that_again_if_it_was_killed(swarm: Swarm) -> None:
    code = (
        "import os, sys, torch; from equipoise.peer import DaemonLost, connect\n"
        "assert 'EQUIPOISE_RESUME' not in os.environ\n"
        "with connect() as peer, peer.join('digits', [torch.ones(1)]) as run:\n"
        "    first = now = peer.status().pid\n"
        "    print(first, peer.status().settings[0].value, run.state, flush=True)\n"
        "    while now == first:\n"
        "        run.average(timeout=0.2)\n"
        "        try:\n"
        "            now = peer.status().pid\n"
        "        except DaemonLost:\n"
        "            pass\n"
        "    print(peer.status().runs[0].name)\n"
        "sys.exit(7)"
    )
    home = str(swarm.folder / "home")
    launched = swarm.command("launch", "--home", home, *LOCAL, "--", sys.executable, "-c", code)
    eventually(lambda: launched.output.endswith("\n"), "the daemon", 60.0)
    pid, told, state = launched.output.split(maxsplit=2)
    assert (told, state.startswith("NoPeers(")) == (home, True)
    assert "/p2p/" in launched.errors

    os.kill(int(pid), signal.SIGKILL)

    assert launched.wait() == 7, launched.errors
    assert launched.output.splitlines()[1] == "digits"
    assert "was ended by SIGKILL; it is started again in 1 s" in launched.errors
    (said,) = [line for line in launched.errors.splitlines() if "this script goes on without" in line]
    assert f"the daemon on {home} (process {pid}) has ended without a word" in said
    assert "Traceback" not in launched.errors
    assert not (swarm.folder / "home" / "control.sock").exists()


def test_launch_leaves_a_daemon_alone_that_was_stopped(swarm: Swarm) -> None:
    code = (
        "import torch; from equipoise.peer import connect\n"
        "with connect() as peer, peer.join('alone', [torch.zeros(1)]) as run:\n"
        "    print('up', flush=True)\n"
        "    while not peer.lost: print(run.average(timeout=300.0).reason)\n"
        "    print(peer.lost)"
    )
    home = str(swarm.folder / "home")
    launched = swarm.command("launch", "--home", home, *LOCAL, "--", sys.executable, "-c", code)
    # Both import their libraries first, which takes minutes of a busy machine; it ends if either fails.
    eventually(lambda: launched.output or not launched.running, "the daemon", 300.0)
    assert launched.output == "up\n", launched.errors

    assert swarm.command("stop", "--home", home).wait() == 0
    assert launched.wait() == 0, launched.errors
    assert "it was stopped (asked by " in launched.output, launched.output
    assert "the daemon was stopped; the script goes on without" in launched.errors


def test_launch_ends_the_script_whose_daemon_cannot_start(swarm: Swarm) -> None:
    code = "from equipoise.peer import connect\nprint('up', flush=True)\nconnect()"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
        words = ("--home", str(swarm.folder / "home"), "--listen", listen)
        launched = swarm.command("launch", *words, "--", sys.executable, "-c", code)

        assert launched.wait() == 1
    assert "in use" in launched.errors
    assert "Traceback" not in launched.errors


def test_launch_passes_on_how_a_script_ended_before_its_daemon_was_up(swarm: Swarm) -> None:
    launched = swarm.command(
        "launch", "--home", str(swarm.folder / "home"), *LOCAL, "--", "sh", "-c", "exit 3"
    )

    assert launched.wait() == 3
    assert launched.errors == ""
    assert not (swarm.folder / "home" / "control.sock").exists()


def test_launch_on_the_home_of_another_daemon_says_so_and_starts_no_script(swarm: Swarm) -> None:
    path = swarm.folder / "home"
    home = Home.take(path)
    launched = swarm.command("launch", "--home", str(path), *LOCAL, "--", "echo", "started")

    assert launched.wait() == 1
    home.release()
    told = f"error: a daemon (pid {os.getpid()}) is already running on {path}; run the script "
    assert (
        launched.errors
        == f"{told}without launch, end the daemon with `equipoise stop`, or give another --home\n"
    )
    assert launched.output == ""


def test_launch_of_a_script_that_cannot_start_leaves_no_daemon(swarm: Swarm) -> None:
    command = swarm.folder / "damaged"
    command.write_text("#!/no/such/interpreter\n")
    command.chmod(0o700)
    launched = swarm.command("launch", "--home", str(swarm.folder / "home"), *LOCAL, "--", str(command))

    assert launched.wait() == 1
    *said, error = launched.errors.splitlines()
    assert error.startswith(f"error: cannot run '{command}': "), launched.errors
    assert said in ([], ["stopping: its script has ended"]), "a daemon that was up by then says that it stops"
    assert wait_until_free(swarm.folder / "home", 0.0)


def test_a_peer_that_nobody_closes_ends_with_its_script(swarm: Swarm) -> None:
    code = (
        "import torch; from equipoise.peer import Peer\n"
        "peer = Peer(listen=['/ip4/127.0.0.1/tcp/0'])\n"
        "run = peer.join('digits', [torch.ones(2)])\n"
        "pending = run.average(timeout=60, wait=False)\n"
        "print(peer.status().settings[0].value)"
    )
    script = swarm.script(code)

    assert script.wait() == 0, script.errors
    assert script.errors == ""
    assert not Path(script.output.strip()).exists()


def test_two_processes_may_not_share_a_run_of_one_daemon(shared: DaemonProcess, swarm: Swarm) -> None:
    with connect(shared.home) as first, connect(shared.home) as second:
        first.join("digits", [torch.zeros(2)], **OPTIONS)
        code = (
            "import torch, equipoise; equipoise.connect(HOME).join('digits', [torch.zeros(2)], codec='fp32')"
        )
        other = swarm.script(code.replace("HOME", repr(str(shared.home))))
        assert other.wait() == 1
        assert re.search(rf"'digits' already, for .* \(process {os.getpid()}\)", other.errors), other.errors
        second.join("other", [torch.zeros(2)], **OPTIONS)
