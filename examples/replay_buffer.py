"""A replay buffer: actors play all the time, each at its own speed, while a learner takes samples of what they did.

The game is a corridor: ten rooms, a prize in the last one, and at each step one goes left or right. The learner keeps a
table of how good each move is in each room (Q-learning), and sends it to the players now and then.
"""

import asyncio
import random
from collections import deque

import torch
from monarch.actor import (
    Actor,
    concurrent_endpoint,
    current_rank,
    endpoint,
    this_host,
    this_proc,
)

ROOMS, LEFT, RIGHT = 10, 0, 1
BATCHES = 400
Move = tuple[int, int, float, int]  # room, direction, reward, next room


class ReplayBuffer(Actor):
    """The latest moves of all players."""

    def __init__(self, size: int) -> None:
        self.moves: deque[Move] = deque(maxlen=size)
        self.added: dict[int, int] = {}
        self.random = random.Random(0)
        self.more = asyncio.Condition()

    @endpoint
    async def add(self, player: int, moves: list[Move]) -> None:
        async with self.more:
            self.moves.extend(moves)
            self.added[player] = self.added.get(player, 0) + len(moves)
            self.more.notify_all()

    @concurrent_endpoint  # others are served while it waits
    async def sample(self, count: int) -> torch.Tensor:
        """Some moves, one a row, as soon as there are enough."""
        async with self.more:
            await self.more.wait_for(lambda: len(self.moves) >= count)
            return torch.tensor(self.random.sample(self.moves, count))

    @endpoint
    async def counts(self) -> dict[int, int]:
        return self.added


class Player(Actor):
    """Plays with the latest table that it was sent, and tries something else now and then."""

    def __init__(self, buffer: ReplayBuffer) -> None:
        self.buffer = buffer
        self.table = torch.zeros(ROOMS, 2)
        self.rank = current_rank().rank
        self.random = random.Random(self.rank)

    @endpoint
    def learn(self, table: torch.Tensor) -> None:
        self.table = table

    @endpoint
    def play(self, me: "Player") -> None:
        """One game. It then tells itself to play another, behind the messages that wait already."""
        room = 0
        moves: list[tuple[int, int, float, int]] = []
        while room < ROOMS - 1 and len(moves) < 100:
            left, right = self.table[room]
            explore = self.random.random() < 0.3 or left == right
            direction = self.random.randrange(2) if explore else int(right > left)
            after = max(room - 1, 0) if direction == LEFT else room + 1
            moves.append((room, direction, float(after == ROOMS - 1), after))
            room = after
        self.buffer.add.broadcast(self.rank, moves)
        me.play.broadcast(me)


def main() -> None:
    buffer = this_proc().spawn("buffer", ReplayBuffer, 2000)
    players = this_host().spawn_procs(per_host={"players": 2}).spawn("players", Player, buffer)
    players.initialized.get()
    for rank in range(2):
        player = players.slice(players=rank)
        player.play.broadcast(player)

    table = torch.zeros(ROOMS, 2)
    for step in range(1, BATCHES + 1):
        batch = buffer.sample.call_one(128).get()
        room, direction, after = batch[:, 0].long(), batch[:, 1].long(), batch[:, 3].long()
        goal = batch[:, 2] + 0.9 * table[after].amax(1) * (after < ROOMS - 1)
        table[room, direction] += 0.5 * (goal - table[room, direction])
        if step % 20 == 0:
            players.learn.broadcast(table)

    for rank, count in sorted(buffer.counts.call_one().get().items()):
        print(f"player {rank} made {count} moves")
    way = "".join("<>"[int(right > left)] for left, right in table[: ROOMS - 1])
    print(f"learnt in {BATCHES} batches: {way}")


if __name__ == "__main__":
    main()
