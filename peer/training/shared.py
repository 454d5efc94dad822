"""`Shared`: tables whose rows the peers of a run hold for each other, with bounded staleness.

`equipoise.averaging.shared` decides who holds what, and when a push counts. This module sends, in a thread of its own.

```
run = peer.join("graph", {"entities": E, "relations": R}, strategy="shared:staleness=4")
shared = Shared(run, optimizer="adagrad:lr=0.1")
rows = shared.pull(entities=ids)
loss(rows["entities"]).backward()
shared.push()
shared.clock()
```
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from equipoise.averaging.options import MAX_GROUP_SIZE
from equipoise.averaging.outcome import SHOWN_CHARS
from equipoise.averaging.shared.keeper import Send
from equipoise.averaging.shared.messages import SHARDS
from equipoise.averaging.shared.node import Does, Done, Node, Parts
from equipoise.averaging.shared.rows import GRADIENTS, IDS, OPTIMIZERS, ROWS, RowStore, packed, unpacked
from equipoise.averaging.shared.view import View, Views
from equipoise.averaging.strategy import SharedTables
from equipoise.peer.client.channels import Delivery, Message
from equipoise.peer.client.futures import PendingRound
from equipoise.peer.client.interrupts import frees_its_run
from equipoise.peer.client.run import JoinedRun
from equipoise.peer.client.safetensors_io import ImageError
from equipoise.peer.errors import EquipoiseError, Lost, Refused

TOPIC = "shared tables"

LOOK_SECONDS = 0.1
"""Time between two looks for peers that came or went, and longest wait for a message."""

ROUND_SECONDS = 10.0
"""Timeout of a round that names a view."""

PATIENCE_SECONDS = 3.0
"""Time after a round before the same peers hold another one: a peer may be gone, or have not entered the view."""

MAX_TOGETHER = 16
"""Most messages that are answered together, and most items in one: where many come, fewer and longer ones go."""

MAX_PUSHES = 64
"""Most pushes that are not settled: the next one waits."""

MAX_SHARD_BYTES = 64 * 2**20
"""Largest shard with its optimizer's state, which is in one message; and size beyond which a message ends."""

LEAVE_SECONDS = 2.0
"""Longest wait until the others have heard that this peer leaves."""

LEFT = "this script has left the run"

End = concurrent.futures.Future[Parts]

log = logging.getLogger(__name__)


class ViewRounds:
    """The rounds of a `branch` that name views: one is due where the live peers are not those of the view."""

    def __init__(self, run: JoinedRun, views: Views) -> None:
        terms = {"strategy": "allreduce", "codec": "fp32", "group_size": MAX_GROUP_SIZE}
        self.branch = run.core.branch(f"{run.name}/views", {"view": torch.zeros(1)}, **terms)
        self._run, self._views = run, views
        self._round: PendingRound | None = None
        self._called, self._live = False, tuple[str, ...]()
        self._met = self._tried = 0.0

    def called(self, view: str) -> None:
        """Note that a peer calls for a round, from its view."""
        late = time.monotonic() - self._met > PATIENCE_SECONDS
        # A peer that is not in this view yet may have called for the round that named it.
        self._called |= late or int(view.partition(".")[0]) >= self._views.view.number

    def look(self, members: tuple[str, ...]) -> View | None:
        """Begin a round of the live peers if one is due, or end the one that goes on; return the view that is named."""
        views, named = self._views, None
        same = views.active and views.view.members == members
        # Other peers are live than at the last try; or that did not help, and some time has gone by.
        changed = members != self._live or time.monotonic() - self._tried > PATIENCE_SECONDS
        if self._round is not None and self._round.done():
            ended, self._round = self._round, None
            self._called, self._tried = False, time.monotonic()
            outcome, self._met = ended.result(), self._tried
            there = tuple(sorted(outcome.contributors))
            absent = ", ".join(f"..{peer[-SHOWN_CHARS:]}" for peer in members if peer not in there)
            if outcome.ok and (views.view.number or there == members):
                named = View(outcome.round, there)
            elif outcome.ok and absent:
                views.refused = f"the first view has all live peers, and {absent} took no part in its round"
        elif self._round is None and (self._called or (not same and changed)):
            # A newcomer to a whole view answers this call by its own: messages then go both ways before the view ends.
            whole = views.active and {*views.view.members} <= {*members} and not self._called
            for peer in {*members} - {self._run.peer, *(views.view.members if whole else ())}:
                self._run.core.channels.send(peer, TOPIC, *packed(views.view.name, ()))
            self._called, self._live, self._tried = False, members, time.monotonic()
            if not whole and len(members) > 1:
                self._round = self.branch.average(timeout=ROUND_SECONDS, wait=False)
            elif not whole and views.view.number:
                named = View(views.view.number + 1, members)  # Nobody is left for a round.
        views.refused = "" if same else views.refused
        return named


class Serving:
    """A peer's thread: it holds shards for others, asks theirs, and enters the views that rounds name."""

    def __init__(self, run: JoinedRun, strategy: SharedTables, new: Callable[[int], RowStore]) -> None:
        """`new` makes the store of a shard."""
        self.node, self.lock = Node(run.peer, strategy, new), threading.RLock()
        self._run, self._timeout, self._over = run, strategy.timeout, threading.Event()
        self._rounds = ViewRounds(run, self.node.views)
        self._numbers, self._asked = itertools.count(1), dict[int, End]()
        self._looked, self._last = 0.0, dict[str, Delivery]()
        self._thread = threading.Thread(target=self._serve, name=self._rounds.branch.name, daemon=True)
        self._thread.start()

    def ask(self, how: Callable[[int, Parts, float], list[Does]], parts: Parts) -> End:
        """Begin a pull or a push of the node; return its end."""
        end = End()
        end.set_running_or_notify_cancel()  # It can be cancelled no more.
        with self.lock:
            number = next(self._numbers)
            self._asked[number] = end
            over = self._over.is_set()
            ended = [Done(number, {}, LEFT if over else "")]
            self.do(ended if over or not parts else how(number, parts, time.monotonic()))
        return end

    def do(self, actions: Sequence[Does], again: bool = False) -> None:
        """Do what the node wants; or not what it says `again`, where the last message is still under way."""
        leaving: dict[str, list[Send]] = defaultdict(list)
        left, me, script = deque(actions), self._run.peer, self._run.core.channels.mailbox.script.hex()
        while left:
            match left.popleft():
                case Send(to, item, payload) if to == me:
                    left += self.node.got(me, script, self.node.views.view.name, item, payload)
                case Send() as send:
                    leaving[send.to].append(send)
                case str(text):
                    log.warning("run %s: %s", self._run.name, text)
                case Done(number, got, reason, lost):
                    end = self._asked.pop(number)
                    if not reason:
                        end.set_result(got)
                        continue
                    log.warning("run %s: pull or push %d: %s", self._run.name, number, reason)
                    end.set_exception(Lost(reason) if lost else Refused(reason))
        for to, sends in leaving.items():
            if not again or to not in self._last or self._last[to].done():
                self._send(to, sends)

    def finish(self) -> None:
        """Serve until all that this peer pushed is settled and the others are as far, or for the strategy's timeout."""
        until, link = time.monotonic() + self._timeout, self._run.core.link
        while not self.node.is_through and time.monotonic() < until:
            if link.lost is not None or self._over.wait(LOOK_SECONDS):
                break
        self._over.set()
        self._thread.join(ROUND_SECONDS)
        with self.lock:
            self.do(self.node.leave())
        if link.lost is None:
            concurrent.futures.wait([one.ended for one in self._last.values()], LEAVE_SECONDS)
        self._rounds.branch.leave()

    def _send(self, to: str, sends: Sequence[Send]) -> None:
        """Send items in few messages. The node says again what is refused here, or lost."""
        size, batch = 0, list[Send]()
        for send in sends:
            batch.append(send)
            size += sum(one.nbytes for one in send.payload.values())
            if size > MAX_SHARD_BYTES or len(batch) == MAX_TOGETHER or send is sends[-1]:
                self._last[to] = self._run.core.channels.send(
                    to, TOPIC, *packed(self.node.views.view.name, [one[1:] for one in batch])
                )
                size, batch = 0, []

    def _serve(self) -> None:
        try:
            while not self._over.is_set() and not self._run.core.left:
                come = self._come()
                with self.lock:
                    self.do([does for message in come for does in self._take(message)])
                    if self.node.deadline <= time.monotonic():
                        self.do(self.node.woke(time.monotonic()), again=True)
                if time.monotonic() - self._looked >= LOOK_SECONDS:
                    self._looked = time.monotonic()
                    with contextlib.suppress(EquipoiseError):  # The daemon has gone, and another may come.
                        self._enter(self._rounds.look(self._run.members))
        finally:
            self._over.set()
            with self.lock:
                self.do([Done(number, {}, LEFT, True) for number in self._asked])

    def _come(self) -> list[Message]:
        """Return the messages that have come; some of them where a further one is broken, or the daemon has gone."""
        come, receive = list[Message](), self._run.core.channels.receive
        try:
            while len(come) < MAX_TOGETHER and (one := receive(TOPIC, 0.0 if come else LOOK_SECONDS)):
                come.append(one)
        except (EquipoiseError, ImageError) as error:
            log.debug("run %s: %s", self._run.name, error)
            self._over.wait(0.0 if come else LOOK_SECONDS)
        return come

    def _take(self, message: Message) -> list[Does]:
        try:
            view, items = unpacked(message.tensors, message.fields)
        except ValueError as error:
            return [f"..{message.sender[-SHOWN_CHARS:]} sent no message of shared tables: {error}"]
        if not items:
            self._rounds.called(view)
        sent = message.sender, message.script, view
        return [does for item, payload in items for does in self.node.got(*sent, item, payload)]

    def _enter(self, view: View | None) -> None:
        if view is not None:
            with self.lock:
                self.do(self.node.enter(view))
        self._run.core.tell("training", self.node.told)


class _Rows(NamedTuple):
    """Rows that were pulled: as [k, ...]; the place of each among the distinct ones; and those of each shard, int64."""

    leaf: torch.Tensor
    places: torch.Tensor
    shards: tuple[torch.Tensor, ...]


class Shared:
    """A peer's part in shared tables; calls from one thread. Leaving the run ends it.

    It serves its shards in a thread of its own, as long as the script runs. With two peers, only the one of the smaller
    PeerID goes on without the other, so begin with three or more.
    """

    @frees_its_run
    def __init__(self, run: JoinedRun, optimizer: str = "adagrad:lr=0.1") -> None:
        """Serve the tables that the run was joined with; the values of the peer that first owns a row count.

        Args:
            run: Joined with `strategy="shared"`, and used for nothing else. Its tables take at most 1 GB in fp32, with
                the optimizer's states.
            optimizer: `sgd:lr=0.1`, `adagrad:lr=0.1` or `adam:lr=0.001`; rows have its state.

        Raises:
            ValueError: The optimizer is unknown, or the tables are too large.
            Refused: The run has another strategy, or is trained already.
        """
        strategy, made = run.core.strategy, OPTIMIZERS.parse(optimizer)
        if not isinstance(strategy, SharedTables):
            raise Refused(f"run {run.name!r} averages by {strategy.name}", 'join it with strategy="shared"')
        run.core.begin_training(type(self).__name__)
        self.run, self._tensors = run, dict(run.core.binding.tensors())
        self._tables = {name: one.detach().cpu().reshape(one.shape[0] if one.dim() else 1, -1)
                        for name, one in self._tensors.items()}  # fmt: skip
        sizes = ((one, one.shape[1]) for one in self._tables.values())
        size = sum(4 * -(-len(one) // SHARDS) * (width + sum(made.widths(width))) for one, width in sizes)
        if size > MAX_SHARD_BYTES:
            raise ValueError(f"expected tables of at most {MAX_SHARD_BYTES} bytes a shard, got {size}")
        run.agree({"shared": made.spec})
        self._rows: dict[str, _Rows] = {}
        self._pushes: deque[End] = deque()
        self._serving = Serving(run, strategy, lambda shard: RowStore(self._tables, shard, made))
        run.core.loop.finishing.append(self._serving.finish)

    @staticmethod
    def of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the tables of a dense model, one for each parameter, to join a run with.

        Then `pull()` writes all parameters, and `push()` sends their gradients.
        """
        return dict(module.named_parameters())

    @property
    def view(self) -> View | None:
        """The peers that serve now; None while they do not agree."""
        with self._serving.lock:
            return self._serving.node.views.view if self._serving.node.views.active else None

    def pull(self, **ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Get rows by their ids, int64 [k]; without ids, write all rows into the tensors that the run was joined with.

        It waits while this peer is more than the staleness ahead of the slowest.

        Returns:
            By table, [k, ...]: leaf tensors, whose gradients `push` sends.

        Raises:
            Refused: They have not come within the strategy's timeout; names the peers that this one waited for. Or the
                owner sent other rows, or this script has left the run.
            ValueError: There is no such table or row.
        """
        asked = {name: self._placed(name, ids.get(name)) for name in ids or self._tables}
        parts: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
        for name, (_, shards) in asked.items():
            for shard, rows in enumerate(shards):
                if len(rows):
                    parts[shard][IDS + name] = rows
        self._rows = {}  # Where the pull fails: rows of one before would pass as its own.
        got = self._serving.ask(self._serving.node.pull, parts).result()
        self._rows = {name: self._read(name, *one, got, dense=not ids) for name, one in asked.items()}
        return {name: one.leaf for name, one in self._rows.items()}

    def push(self) -> End:
        """Send the gradients of the rows that were pulled last; returns at once unless 64 pushes are under way.

        Returns:
            Its end, whose `result(timeout)` returns once all holders of the rows have counted it. It raises `Refused`,
            with the reason, where rows have not counted it, as they are too old, or the gradient is not finite; or
            `Lost` if nobody can say. The log has a line of that, too. Without gradients it has ended.
        """
        parts: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
        for name, (leaf, places, shards) in self._rows.items():
            if leaf.grad is not None:
                summed = torch.zeros(sum(map(len, shards)), self._tables[name].shape[1])
                summed.index_add_(0, places, leaf.grad.float().cpu().reshape(len(places), -1))
                leaf.grad = None
                for shard, gradient in enumerate(torch.split(summed, [*map(len, shards)])):
                    if len(gradient):
                        parts[shard] |= {IDS + name: shards[shard], GRADIENTS + name: gradient}
        while self._pushes and (self._pushes[0].done() or len(self._pushes) >= MAX_PUSHES):
            concurrent.futures.wait([self._pushes.popleft()])
        self._pushes.append(self._serving.ask(self._serving.node.push, parts))
        return self._pushes[-1]

    def clock(self) -> None:
        """End a clock: others that are ahead go on once all pushes before it are settled."""
        with self._serving.lock:
            self._serving.do(self._serving.node.tick())

    def version(self, table: str) -> int:
        """Version of the rows of all tables: it never goes back.

        A push adds 1 for each of the 16 shards that its rows are of. Only what this peer's pulls and pushes saw counts.

        Raises:
            ValueError: There is no such table.
        """
        if table not in self._tables:
            raise ValueError(f"expected one of the tables {', '.join(self._tables)}, got {table!r}")
        return sum(self._serving.node.versions)

    def _placed(self, name: str, ids: torch.Tensor | None) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The places and the shards of ids, as `_Rows` has them; of all rows without any."""
        if name not in self._tables:
            raise ValueError(f"expected one of the tables {', '.join(self._tables)}, got {name!r}")
        count = len(self._tables[name])
        given = torch.arange(count) if ids is None else torch.as_tensor(ids).cpu()
        if given.dtype != torch.int64 or given.dim() != 1 or not ((given >= 0) & (given < count)).all():
            raise ValueError(f"expected ids of table {name!r}, int64 below {count}")
        keys, places = torch.unique(given % SHARDS * count + given // SHARDS, return_inverse=True)
        sizes = torch.bincount(keys.div(count, rounding_mode="floor"), minlength=SHARDS)
        return places, torch.split(keys % count, sizes.tolist())

    def _read(
        self, name: str, places: torch.Tensor, shards: tuple[torch.Tensor, ...], got: Parts, dense: bool
    ) -> _Rows:
        like, width = self._tensors[name], self._tables[name].shape[1]
        found = {at: got[at].get(ROWS + name, torch.empty(0)) for at, rows in enumerate(shards) if len(rows)}
        for at, rows in found.items():
            if (rows.dtype, rows.shape) != (torch.float32, (len(shards[at]), width)):
                raise Refused(
                    f"the owner of shard {at} sent {list(rows.shape)} values for {len(shards[at])} rows"
                )
        values = torch.cat([*found.values(), torch.empty(0, width)])[places].view(
            len(places), *like.shape[1:]
        )
        if dense:
            with torch.no_grad():
                return _Rows(like.copy_(values.view(like.shape)), places, shards)
        return _Rows(values.to(like.device, like.dtype).requires_grad_(), places, shards)
