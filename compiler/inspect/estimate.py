"""The estimated time of a step on a cluster, from the plan's report: nothing runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from monarch.compiler.cost.cluster import Cluster
from monarch.compiler.inspect.values import local_bytes, report_of
from monarch.compiler.plan import Plan, ReportedValue
from monarch.compiler.plan.report import Collectives, peak


@dataclass(frozen=True)
class Estimate:
    """One step of one worker.

    `seconds`        from its start to its end
    `computing`      of these, the seconds in which the worker computes
    `communicating`  the seconds of collectives by the mesh dims that they run over ("data", "model,data"), whether or
                     not the worker computes meanwhile
    `waiting`        seconds in which the worker waits for collectives, and does nothing else, by these mesh dims;
                     under "transfers" for what other parts of a program of several meshes send
    `sent`           bytes that it sends, by mesh dims
    `flops`          floating-point operations
    `used`           the part of the machine's peak rate that these come to
    `peak`           the most bytes that it holds at once
    `items`          what all workers take in a step: tokens, where an input is a batch of texts of numbers, or examples
    `unit`           "tokens" or "examples"; "" where there is no input with a dim
    """

    seconds: float
    computing: float
    communicating: dict[str, float]
    waiting: dict[str, float]
    sent: dict[str, int]
    flops: float
    used: float
    peak: int
    items: int
    unit: str


def estimate(plan: Plan, cluster: Cluster) -> Estimate:
    """The estimate for a plan whose report was made for `cluster` (`compile_graph(…, cluster=cluster)`).

    One worker's step is simulated, of a program of several meshes one of each, the busiest of which the estimate is of:
    instructions follow one another, and collectives follow one another on a lane of their own; one that is started
    ahead is waited for where its `wait` stands, any other at once. A part waits for what another sends it, in `waiting`
    under "transfers", and leaves its cores to the others meanwhile. Raises MonarchError for a plan without a report.
    """
    plans = [part.plan for part in plan.parts] or [plan]
    workers = [_Worker(each, cluster) for each in plans]
    seconds = _simulate(workers, plan, cluster)
    busiest = max(workers, key=lambda worker: worker.computing)
    flops = sum(value.flops for value in busiest.values)
    items, unit = _items(plan)
    machine = cluster.shared(busiest.count).machine
    most = max((machine.rate(dtype) for dtype in _products(busiest.values)), default=machine.rate("f32"))
    return Estimate(
        seconds=seconds,
        computing=busiest.computing,
        communicating=busiest.communicating,
        waiting=busiest.waiting,
        sent=busiest.sent,
        flops=flops,
        used=flops / seconds / most if seconds else 0.0,
        peak=max(peak(each)[0] for each in plans),
        items=items,
        unit=unit,
    )


class _Worker:
    """A worker of a plan, or of a part of one, on its way through its instructions.

    `count`  how many there are, which all do the same at once
    `share`  how many times as long its report takes everything to be, for they share cores
    `left`   seconds of the stretch that it computes, as the report has them; then it sends transfer `sends`
    `until`  when what it waits for is there
    """

    def __init__(self, plan: Plan, cluster: Cluster) -> None:
        self.plan, self.values = plan, report_of(plan).values
        self.count, self.share = plan.mesh.workers, cluster.share(plan.mesh.workers)
        self.left = self.until = self.computing = 0.0
        self.sends: int | None = None
        self.communicating: dict[str, float] = {}
        self.waiting: dict[str, float] = {}
        self.sent: dict[str, int] = {}
        self._at, self._free = 0, 0.0
        self._ahead = {value.reads[0] for value in self.values if value.op == "wait" and value.reads}
        self._ends: dict[int, tuple[float, str]] = {}
        self._within: tuple[Collectives, ...] = ()
        self._met: float | None = None
        """Since when it waits for a transfer."""

    def awaited(self) -> Iterator[int]:
        """The transfers that come to it."""
        return (self._transfer(value, 0) for value in self.values if value.op == "recv")

    def go(self, now: float, arrivals: Mapping[int, float]) -> None:
        """Go on to the next stretch that takes time, or wait that does. `arrivals` has the times at which transfers
        arrive; a worker that waits for one that is not sent yet stays."""
        while (self._at < len(self.values) or self._within) and not self.left and self.sends is None:
            if self._within:
                self._meet(now)
                return
            number, value = self._at, self.values[self._at]
            if value.op == "recv":
                arrival = arrivals.get(self._transfer(value, 0))
                self._met = now if self._met is None else self._met
                if arrival is None or arrival > now:
                    self.until = 0.0 if arrival is None else arrival
                    return
                self._waited("transfers", now - self._met)
                self._met = None
            self._at += 1
            if value.mesh_dims:
                self._start(number, value, now)
                if number in self._ahead:
                    continue
            if value.mesh_dims or value.op == "wait":
                until, dims = self._ends.get(number if value.mesh_dims else value.reads[0], (now, ""))
                if until > now:
                    self._waited(dims, until - now)
                    self.until = until
                    return
            else:
                self._compute(value)

    def _compute(self, value: ReportedValue) -> None:
        """Take this op, and those behind it up to one that others have a part in."""
        self.left += value.computing
        while value.op != "send" and self._at < len(self.values):
            following = self.values[self._at]
            if value.within or following.mesh_dims or following.op in ("wait", "recv"):
                break
            value = following
            self.left += value.computing
            self._at += 1
        self._within = value.within
        self.sends = self._transfer(value, 1) if value.op == "send" else None

    def _meet(self, now: float) -> None:
        """Wait for the collectives within a loop or a branch, behind what that computes: they alternate, and nothing
        hides them."""
        self.until = max(now, self._free)
        for each in self._within:
            dims = ",".join(each.mesh_dims)
            self.communicating[dims] = self.communicating.get(dims, 0.0) + each.seconds
            self.sent[dims] = self.sent.get(dims, 0) + each.sent
            self._waited(dims, each.seconds)
            self.until += each.seconds
        self._waited(",".join(self._within[0].mesh_dims), max(0.0, self._free - now))
        self._free, self._within = self.until, ()

    def _start(self, number: int, value: ReportedValue, now: float) -> None:
        dims = ",".join(value.mesh_dims)
        self.communicating[dims] = self.communicating.get(dims, 0.0) + value.seconds
        self.sent[dims] = self.sent.get(dims, 0) + value.sent
        self._free = max(now, self._free) + value.seconds
        self._ends[number] = self._free, dims

    def _waited(self, what: str, seconds: float) -> None:
        if seconds:
            self.waiting[what] = self.waiting.get(what, 0.0) + seconds

    def _transfer(self, value: ReportedValue, argument: int) -> int:
        return int(self.plan.instructions[value.instruction].args[argument])


def _simulate(workers: Sequence[_Worker], plan: Plan, cluster: Cluster) -> float:
    """Seconds from the first to the last instruction. Workers that compute at the same time share the cores. The
    transfers that a part alone waits for have no known time: they count as arrived."""
    now = 0.0
    arrivals = {} if plan.parts else dict.fromkeys(workers[0].awaited(), now)
    while True:
        for worker in workers:
            if worker.sends is not None and not worker.left:
                if plan.parts:
                    arrivals[worker.sends] = now + _sending(plan, worker.sends, cluster)
                worker.sends = None
        for worker in workers:
            if worker.until <= now:
                worker.go(now, arrivals)
        if any(worker.sends is not None and not worker.left for worker in workers):
            continue
        running = [worker for worker in workers if worker.left]
        share = cluster.share(sum(worker.count for worker in running))
        times = [worker.left * share / worker.share for worker in running]
        step = min([*times, *(worker.until - now for worker in workers if worker.until > now)], default=None)
        if step is None:
            return now
        now += step
        for worker, took in zip(running, times, strict=True):
            worker.computing += step
            worker.left = 0.0 if took <= step else worker.left - step * worker.share / share


def _sending(plan: Plan, number: int, cluster: Cluster) -> float:
    """Seconds until one part's transfer has arrived at another."""
    transfer = plan.transfers[number]
    source, target = plan.parts[transfer.source], plan.parts[transfer.target]
    ranks = [*source.place.ranks(), *target.place.ranks()]
    link = next(
        level.link
        for level in cluster.levels
        if level.workers is None or len({rank // level.workers for rank in ranks}) == 1
    )
    return link.latency + local_bytes(transfer.received, target.plan.mesh) / link.bandwidth


def _products(values: tuple[ReportedValue, ...]) -> set[str]:
    """The dtypes of the ops that compute most: half of all operations or more."""
    by_dtype: dict[str, float] = {}
    for value in values:
        if value.flops and value.types and value.types[0] is not None:
            dtype = value.types[0].dtype_name
            by_dtype[dtype] = by_dtype.get(dtype, 0.0) + value.flops
    return {max(by_dtype, key=lambda dtype: by_dtype[dtype])} if by_dtype else set()


def _items(plan: Plan) -> tuple[int, str]:
    """The plan's own inputs say it: those of its values have padding in them."""
    shapes = [spec.type for spec in plan.inputs if spec.kind == "input"]
    for type_ in shapes:
        if type_.dtype_name == "i64" and type_.ndim == 2:
            return type_.shape[0] * type_.shape[1], "tokens"
    return next(((type_.shape[0], "examples") for type_ in shapes if type_.ndim), (0, ""))
