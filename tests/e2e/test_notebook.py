"""The notebook of `scripts/examples` in a kernel: its cells run twice, are interrupted, and run after a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from e2e.swarm import Swarm, eventually

NOTEBOOK = Path(__file__).resolve().parents[2] / "scripts" / "examples" / "swarm.ipynb"


TOGETHER = "mean over 2 of 2 members"


class Notebook:
    """The notebook, opened in a folder of its own; a cell is named by a part of its source."""

    def __init__(self, folder: Path) -> None:
        self._cells = nbformat.read(NOTEBOOK, as_version=4)
        self.client = NotebookClient(self._cells, timeout=100, resources={"metadata": {"path": str(folder)}})

    async def run(self, part: str, source: str = "") -> str:
        """Run a cell, maybe with another source in its place, and return what it printed.

        Raises:
            CellExecutionError: The cell failed.
        """
        ((index, cell),) = [
            (index, cell)
            for index, cell in enumerate(self._cells.cells)
            if cell.cell_type == "code" and part in cell.source
        ]
        shown, cell.source = cell.source, source or cell.source
        try:
            await self.client.async_execute_cell(cell, index)
        finally:
            cell.source = shown
        return "".join(output.get("text", "") for output in cell.outputs)


async def test_cells_run_again_after_an_interrupt_and_after_a_restart(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**swarm.env, "EQUIPOISE_LISTEN": "/ip4/127.0.0.1/tcp/0"}.items():
        monkeypatch.setenv(name, value)
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(swarm.folder / name))
    notebook = Notebook(swarm.folder)
    async with notebook.client.async_setup_kernel():
        await notebook.run("peer = Peer(")
        await notebook.run("peer = Peer(")
        await notebook.run("OTHER =")
        await notebook.run("run = peer.join(")
        await notebook.run("run = peer.join(")
        assert TOGETHER in await notebook.run("end =")

        started = swarm.folder / "started"
        endless = "while True:\n    optimizer.zero_grad()\n    model(torch.randn(32, 64)).square().mean().backward()\n"
        endless += f"    optimizer.step()\n    open({str(started)!r}, 'w').close()"
        running = asyncio.create_task(notebook.run("end =", endless))
        await asyncio.to_thread(eventually, started.exists, "the first step")
        await notebook.client.km.interrupt_kernel()
        with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
            await running
        assert TOGETHER in await notebook.run("end =")
        identity = await notebook.run("print(peer.peer_id)")

        await notebook.client.km.restart_kernel()
        await notebook.client.kc.wait_for_ready()
        for part in ("peer = Peer(", "OTHER =", "run = peer.join("):
            await notebook.run(part)
        assert TOGETHER in await notebook.run("end =")
        assert await notebook.run("print(peer.peer_id)") == identity
        await notebook.run("other.terminate()\npeer.close()")
