"""Mistakes that a type checker finds before anything runs: one a line, each with the rule that it breaks."""

from __future__ import annotations

from monarch.actor import Actor, Port, as_endpoint, concurrent_endpoint, endpoint, send, this_host


class Trainer(Actor):
    def __init__(self, width: int) -> None:
        self.width = width

    @endpoint
    def step(self, batch: int, lr: float = 0.1) -> float:
        return batch * lr

    @endpoint(explicit_response_port=True)
    def later(self, port: Port[str], question: str) -> None:
        port.send(3)  # reportArgumentType

    @concurrent_endpoint  # reportArgumentType
    def beside(self) -> None: ...

    def debug(self, level: int) -> str:
        return str(level)


procs = this_host().spawn_procs(per_host={"gpus": 8})
trainers = procs.spawn("trainers", Trainer, 128)
procs.spawn("trainers", Trainer)  # reportCallIssue
procs.spawn("trainers", Trainer, "wide")  # reportArgumentType
procs.spawn("trainers", int, 3)  # reportArgumentType, reportCallIssue

trainers.step.call("1")  # reportArgumentType
trainers.step.call_one()  # reportCallIssue
trainers.step.choose(1, rate=0.1)  # reportCallIssue
trainers.step.broadcast(1, 2, 3)  # reportCallIssue
trainers.step.stream(1, lr="fast")  # reportArgumentType
trainers.step(1)  # reportCallIssue
trainers.fly.call()  # reportAttributeAccessIssue
trainers.later.call_one(3)  # reportArgumentType
as_endpoint(trainers.debug).call("loud")  # reportArgumentType
send(trainers.step, (1,), {}, selection="some")  # reportArgumentType
loss: str = trainers.step.call_one(1).get()  # reportAssignmentType
losses: list[float] = trainers.step.call(1).get()  # reportAssignmentType
answer: int = trainers.later.call_one("why?").get()  # reportAssignmentType
