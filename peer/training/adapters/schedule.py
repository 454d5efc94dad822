"""What callbacks of frameworks are given, and schedulers of frameworks made to follow the swarm's epochs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from equipoise.peer.client.run import JoinedRun
from equipoise.peer.training.counting import Count
from equipoise.peer.training.optimizer import SwarmOptimizer


class SwarmSteps:
    """What a callback is given to have a framework's trainer step with the swarm.

    Attributes:
        optimizer: The swarm's optimizer, from the start of training on: its `epoch`, `reason`, `last`.
    """

    def __init__(
        self,
        run: JoinedRun,
        *,
        target_batch_size: float,
        epochs: int | None = None,
        count: Count | None = None,
        shares: bool = True,
        **options: Any,
    ) -> None:
        """Say how the swarm steps.

        Args:
            run: Joined with the model, or LightningModule, that is given to the trainer.
            target_batch_size: Samples, of all peers together, that make an update.
            epochs: The swarm's epoch at which training stops, if that is to be before the trainer's end.
            count: Counts a batch, as `lambda batch: batch["attention_mask"].sum()`: `target_batch_size` is then of such
                tokens. By default samples count.
            shares: Whether to draw this peer's share of a data set that others have too, where its loader shuffles:
                `Shares` takes the place of that. Peers whose data differ draw all of theirs anyway.
            **options: `checkpoints`, and other fields of `equipoise.peer.training.Options`: by default `batch_size`,
                `clip` and `scheduler` are the trainer's.
        """
        self.optimizer: SwarmOptimizer | None = None
        self._run, self._epochs, self._count, self._shares = run, epochs, count, shares
        self._end: float = 0
        self._options = {"target_batch_size": target_batch_size, **options}

    @property
    def _is_over(self) -> bool:
        """Whether the swarm has made its epochs, those before a training that goes on from a file included."""
        return self.optimizer is not None and progress(self.optimizer) >= self._end


class _Paced:
    """Comes before the class of a scheduler: to its framework it is what it was, but `step` does nothing."""

    def step(self, *args: object, **kwargs: object) -> None:
        pass


class Pace:
    """The swarm's end of such a scheduler, with its `state_dict` and `load_state_dict`."""

    def __init__(self, scheduler: LRScheduler, settings: Mapping[str, float]) -> None:
        self._scheduler = scheduler
        self._settings = settings
        self._step = type(scheduler).step
        self.load_state_dict = scheduler.load_state_dict
        # Its __dict__ is its state_dict, which frameworks save, so a method of the instance has no place in it.
        scheduler.__class__ = type(f"Paced{type(scheduler).__name__}", (_Paced, type(scheduler)), {})

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's, with its further settings."""
        return {**self._scheduler.state_dict(), **self._settings}

    @property
    def last_epoch(self) -> int:
        """Its number of steps, those before a training that goes on from a file included."""
        return self._scheduler.last_epoch

    def step(self) -> None:
        """Step it."""
        self._step(self._scheduler)


def progress(optimizer: SwarmOptimizer) -> int:
    """The epochs that are made, those before a training that goes on from a framework's file included."""
    return max(optimizer.epoch, getattr(optimizer.scheduler, "last_epoch", 0))


def paced(scheduler: LRScheduler | None, **settings: float) -> Callable[[Optimizer], Pace] | None:
    """A scheduler as the option `scheduler` of `Run.optimizer` takes it; its own `step` does nothing any more.

    Peers step a scheduler alike only if each does so once an epoch of the swarm; batches they count differently. Its
    `settings` are those that its `state_dict` does not show, as those within a function: peers compare them too.

    Raises:
        TypeError: It wants a metric, which peers measure differently.
    """
    if scheduler is None:
        return None
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        raise TypeError(
            f"expected a scheduler that counts steps, got {type(scheduler).__name__}: "
            "peers would differ in what it sees"
        )
    pace = Pace(scheduler, settings)
    return lambda _: pace
