"""Trainers of frameworks on real daemons: loss curves are those of one process with the same global batches.

The target is below a batch, so each update is of one step of both peers: the process makes it of all their rows.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from e2e.swarm import DaemonProcess
from e2e.threads import together
from equipoise.peer import Run, connect

pytestmark = pytest.mark.slow

PEERS, BATCH, STEPS, HALF = 2, 4, 6, 3
OPTIONS = ("accumulate", "bf16", "evaluate", "resume", "stop", "short", "tokens")
RATE = 1e-2


class Script:
    """One training, of a peer or of the one process.

    Attributes:
        curve: By update, the loss on rows that nobody trains on.
    """

    def __init__(self, run: Run | None, at: int | None, option: str, folder: Path) -> None:
        self.run, self.option, self.folder = run, option, folder
        self.text = importlib.import_module("fakes.huggingface")
        self.model = self.text.model()
        self.curve: dict[int, float] = {}
        self.evaluates = option == "stop" or (option == "evaluate" and not at)
        self.held_out = self.text.data(99)[: 2 * BATCH]
        own = [self.rows(one) for one in ([at] if at is not None else range(PEERS))]
        starts = range(0, len(own[0]), BATCH)
        self.data = [row for start in starts for rows in own for row in rows[start : start + BATCH]]
        # In bf16, each sum of gradients is rounded: the one process then makes the same ones.
        both = 1 if at is not None or option == "bf16" else PEERS
        self.batch = both * BATCH
        self.accumulate = (2 if option == "accumulate" else 1) * (PEERS if at is None and both == 1 else 1)
        self.counts = {"count": lambda batch: (batch["labels"] >= 0).sum()} if option == "tokens" else {}

    def rows(self, at: int) -> list[dict[str, torch.Tensor]]:
        rows = self.text.data(at)[: 10 if self.option == "short" else None]
        if self.option != "tokens":
            return list(rows)
        masked = [torch.arange(self.text.TOKENS) < (number + at) % 2 for number in range(len(rows))]
        return [
            {**row, "labels": row["labels"].masked_fill(mask, -100)}
            for row, mask in zip(rows, masked, strict=True)
        ]

    def optimizers(self) -> tuple[torch.optim.Optimizer, LambdaLR]:
        """AdamW with a rate that warms up, and then falls."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE)
        return optimizer, LambdaLR(optimizer, lambda step: min((step + 1) / 2, 1 - step / STEPS))

    def loader(self, resumes: bool) -> DataLoader[Any]:
        """The rows; those that are left where a training goes on, which only Hugging Face's Trainer finds itself."""
        left = self.data[HALF * self.batch * self.accumulate :] if resumes else self.data
        return DataLoader(left, self.batch)  # type: ignore[arg-type]

    @torch.no_grad()
    def look(self, update: int) -> None:
        """Note the loss after an update."""
        was = self.model.training
        rows = {name: torch.stack([row[name] for row in self.held_out]) for name in self.held_out[0]}
        if update:
            self.curve[update] = float(self.model.eval()(**rows).loss)
        self.model.train(was)


def apart(*holders: Any) -> None:
    """Give what one script made of Accelerate a state of its own: scripts are processes, but threads in this test."""
    own = copy.deepcopy(holders[0].gradient_state.__dict__)
    for holder in holders:
        holder.gradient_state.__dict__ = own


def huggingface(script: Script, until: int, resumes: bool) -> Callable[[], object]:
    """A Trainer with evaluation, checkpoints and early stop of its own."""
    text, option = script.text, script.option
    from transformers import EarlyStoppingCallback, TrainerCallback

    class Curve(TrainerCallback):
        def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
            apart(training.accelerator, training.optimizer, kwargs["train_dataloader"])

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            script.look(training.lr_scheduler.last_epoch)

    options: dict[str, Any] = {
        "per_device_train_batch_size": script.batch,
        "gradient_accumulation_steps": script.accumulate,
        "bf16": option == "bf16",
        "max_steps": STEPS,
        "warmup_steps": 2,
        "save_strategy": "steps" if option == "resume" else "no",
        "save_steps": HALF,
    }
    if script.evaluates:
        options |= {"eval_strategy": "steps", "eval_steps": 1}
    if option == "stop":
        options |= {"metric_for_best_model": "loss", "save_strategy": "no"}
    training = text.trainer(script.folder, script.model, script.data, script.held_out, **options)
    if script.run is not None:
        callback = {"target_batch_size": 1.0, "wait_for": 1, "epochs": until, **script.counts}
        training.add_callback(text.SwarmCallback(script.run, **callback))
    training.add_callback(Curve())
    if option == "stop":  # No loss falls so far: training ends after as many looks.
        training.add_callback(EarlyStoppingCallback(HALF - 1, early_stopping_threshold=10.0))
    file = script.folder / f"checkpoint-{HALF}"
    if resumes:  # Nothing here is drawn, and two threads cannot read it at once.
        (file / "rng_state.pth").unlink()
    return lambda: training.train(resume_from_checkpoint=str(file) if resumes else None)


def lightning(script: Script, until: int, resumes: bool) -> Callable[[], object]:
    """A Trainer with validation, early stop and checkpoints of its own."""
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import EarlyStopping

    from equipoise.peer.training.adapters.lightning import SwarmCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = script.model

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch).loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("loss", self.model(**batch).loss)

        def configure_optimizers(self) -> Any:
            optimizer, scheduler = script.optimizers()
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    class Curve(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            script.look(trainer.lr_scheduler_configs[0].scheduler.last_epoch)

    callbacks: list[Any] = []
    if script.run is not None:
        callback = {"target_batch_size": 1.0, "wait_for": 1, "epochs": until, **script.counts}
        callbacks.append(SwarmCallback(script.run, batch_size=BATCH, **callback))
    callbacks.append(Curve())
    if script.option == "stop":
        callbacks.append(EarlyStopping("loss", 10.0, patience=HALF - 1, check_on_train_epoch_end=False))
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(
        accelerator="cpu",
        callbacks=callbacks,
        max_steps=STEPS,
        precision="bf16-mixed" if script.option == "bf16" else "32-true",
        accumulate_grad_batches=script.accumulate,
        num_sanity_val_steps=0,
        val_check_interval=1,
        check_val_every_n_epoch=None,
        default_root_dir=script.folder,
        **dict.fromkeys(quiet, False),
    )
    file = script.folder / "half.ckpt"
    held_out = DataLoader(script.held_out, 2 * BATCH) if script.evaluates else None

    def run() -> None:
        trainer.fit(Module(), script.loader(resumes), held_out, ckpt_path=file if resumes else None)
        if until == HALF:
            trainer.save_checkpoint(file)

    return run


def accelerate(script: Script, until: int, resumes: bool) -> Callable[[], object]:
    """A loop that evaluates, stops and goes on by itself."""
    from accelerate import Accelerator

    from equipoise.peer.training.adapters.accelerate import step_with_swarm

    precision = "bf16" if script.option == "bf16" else "no"
    accelerator = Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=script.accumulate
    )
    model, *rest = accelerator.prepare(script.model, *script.optimizers(), script.loader(resumes))
    optimizer, scheduler, loader = rest
    if resumes:
        accelerator.load_state(script.folder / "half")

    def run() -> None:
        if script.run is not None:
            swarm = step_with_swarm(
                accelerator,
                script.run,
                optimizer,
                scheduler,
                batch_size=BATCH,
                target_batch_size=1.0,
                wait_for=1,
            )
        apart(accelerator, optimizer, scheduler, loader)
        count = script.counts.get("count", lambda batch: len(batch["labels"]))
        batches = (batch for _ in range(STEPS) for batch in loader)
        while scheduler.scheduler.last_epoch < until:
            batch = next(batches)
            with accelerator.accumulate(model):
                if script.run is not None:
                    swarm.count(count(batch))
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            script.look(scheduler.scheduler.last_epoch)
            if script.option == "stop" and len(script.curve) == HALF:
                break
        if until == HALF:
            accelerator.save_state(script.folder / "half")

    return run


ADAPTERS: dict[str, Callable[[Script, int, bool], Callable[[], object]]] = {
    "huggingface": huggingface,
    "lightning": lightning,
    "accelerate": accelerate,
}


def trained(
    train: Callable[[Script, int, bool], Callable[[], object]],
    places: Sequence[DaemonProcess],
    name: str,
    option: str,
    folder: Path,
) -> list[Script]:
    """The scripts of both peers, with the whole curve, also of trainings that go on from a file."""
    curves: list[dict[int, float]] = [{} for _ in places]
    for until, resumes in ((HALF, False), (STEPS, True)) if option == "resume" else ((STEPS, False),):
        with contextlib.ExitStack() as stack:
            scripts = []
            for at, place in enumerate(places):
                script = Script(None, at, option, folder / str(at))
                peer = stack.enter_context(connect(place.home))
                script.run = stack.enter_context(peer.join(f"{name} {resumes}", script.model, codec="fp32"))
                scripts.append(script)
            # Trainers are made one after another, before any begins: Accelerate keeps one state for a process.
            together(lambda run: run(), [train(script, until, resumes) for script in scripts])
        for curve, script in zip(curves, scripts, strict=True):
            curve |= script.curve
            script.curve = curve
    return scripts


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_curves_are_those_of_one_process_with_the_same_global_batches(
    places: list[DaemonProcess], tmp_path: Path, adapter: str, option: str
) -> None:
    for needed in ("transformers", adapter.replace("huggingface", "transformers")):
        pytest.importorskip(needed, reason="needs the extra `adapters`")
    importlib.import_module("accelerate.state").AcceleratorState._reset_state(True)  # It differs by option.
    one, other = trained(ADAPTERS[adapter], places, f"{adapter} {option}", option, tmp_path)
    alone = Script(None, None, option, tmp_path / "alone")
    ADAPTERS[adapter](alone, STEPS, False)()
    assert sorted(alone.curve) == list(range(1, (HALF if option == "stop" else STEPS) + 1))
    assert one.curve == other.curve
    assert one.curve == pytest.approx(alone.curve, abs=1e-4)
    assert len(set(alone.curve.values())) > 2
