"""Reinforcement learning of a policy that writes text, in small: generators, a reward, a trainer, and weights that go
straight from the trainer's memory into the generators'.

The task is to count: given a digit, write the six that follow it. To each prompt a generator writes a group of answers;
what is learnt from one is how much better it is than the rest of its group (GRPO, Shao et al. 2024, arXiv:2402.03300).
Generators and reward talk to each other; the program only says what is next.
"""

from dataclasses import dataclass

import torch
from monarch.actor import Actor, current_rank, endpoint, this_host
from monarch.rdma import RDMABuffer
from torch import nn

DIGITS, LENGTH = 10, 6
PROMPTS, GROUP = 8, 16  # for each generator and step
STEPS = 30


class Policy(nn.Module):
    """The next digit, from the last two. Its parameters lie in one tensor, `flat`."""

    def __init__(self) -> None:
        super().__init__()
        self.digits = nn.Embedding(DIGITS, 16)
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, DIGITS))
        self.flat = torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters()])
        at = 0
        for parameter in self.parameters():
            parameter.data = self.flat[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Logits for each place of `text` (count, length) but the first two: (count, length - 2, 10)."""
        last = torch.cat([self.digits(text[:, :-2]), self.digits(text[:, 1:-1])], dim=-1)
        return self.layers(last)


@dataclass
class Group:
    """Answers to one prompt, with what they were worth and how likely they were when they were written."""

    text: torch.Tensor  # (GROUP, 2 + LENGTH), the prompt twice before each answer
    likely: torch.Tensor  # (GROUP, LENGTH), log probabilities
    reward: torch.Tensor  # (GROUP,)


def log_likely(policy: Policy, text: torch.Tensor) -> torch.Tensor:
    """The log probability of each digit that was written."""
    return policy(text).log_softmax(-1).gather(-1, text[:, 2:, None]).squeeze(-1)


class Reward(Actor):
    @endpoint
    def score(self, text: torch.Tensor) -> torch.Tensor:
        """The share of digits that follow the one before."""
        return (text[:, 2:] == (text[:, 1:-1] + 1) % DIGITS).float().mean(1)


class Trainer(Actor):
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.policy = Policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.02)

    @endpoint
    def weights(self) -> RDMABuffer:
        """Where the weights are: the optimizer writes them in place, so this is asked for once."""
        return RDMABuffer(self.policy.flat)

    @endpoint
    def step(self, groups: list[Group]) -> float:
        """Learn from these groups; gives their mean reward."""
        text = torch.cat([group.text for group in groups])
        before = torch.cat([group.likely for group in groups])
        gain = torch.cat([(group.reward - group.reward.mean()) / (group.reward.std() + 1e-4) for group in groups])
        for _ in range(2):
            ratio = (log_likely(self.policy, text) - before).exp()
            clipped = ratio.clamp(0.8, 1.2)
            loss = -torch.minimum(ratio * gain[:, None], clipped * gain[:, None]).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return torch.cat([group.reward for group in groups]).mean().item()


class Generator(Actor):
    def __init__(self, trainer: Trainer, reward: Reward) -> None:
        self.policy = Policy()
        self.source = trainer.weights.call_one().get()
        self.reward = reward
        self.random = torch.Generator().manual_seed(current_rank().rank)

    @endpoint
    def generate(self) -> list[Group]:
        """Take the trainer's weights, write a group of answers to each of some prompts, and have them scored."""
        self.source.read_into(self.policy.flat).get()
        prompts = torch.randint(DIGITS, (PROMPTS, 1), generator=self.random)
        text = self.write(prompts.repeat_interleave(GROUP, 0))
        with torch.no_grad():
            likely = log_likely(self.policy, text)
        rewards = self.reward.score.call_one(text).get()
        parts = zip(text.split(GROUP), likely.split(GROUP), rewards.split(GROUP), strict=True)
        return [Group(*part) for part in parts]

    @endpoint
    def answer(self, digit: int) -> str:
        self.source.read_into(self.policy.flat).get()
        return "".join(map(str, self.write(torch.tensor([[digit]]))[0, 2:].tolist()))

    @torch.no_grad()
    def write(self, prompts: torch.Tensor) -> torch.Tensor:
        text = prompts.repeat(1, 2)
        for _ in range(LENGTH):
            logits = self.policy(nn.functional.pad(text[:, -2:], (0, 1)))[:, -1]
            digit = torch.multinomial(logits.softmax(-1), 1, generator=self.random)
            text = torch.cat([text, digit], dim=1)
        return text


def main() -> None:
    host = this_host()
    trainer = host.spawn_procs(name="trainer").spawn("trainer", Trainer)
    reward = host.spawn_procs(name="reward").spawn("reward", Reward)
    writers = host.spawn_procs(per_host={"copies": 2}, name="writers")
    generators = writers.spawn("generators", Generator, trainer, reward)

    writing = generators.generate.call()
    for step in range(STEPS):
        groups = [group for written in writing.get().values() for group in written]
        learning = trainer.step.call_one(groups)
        writing = generators.generate.call()  # meanwhile, with the weights as they are just then
        if step % 5 == 0 or step == STEPS - 1:
            print(f"step {step:2}  mean reward {learning.get():.2f}")
    writing.get()
    print(f"3 is followed by {generators.answer.choose(3).get()}")


if __name__ == "__main__":
    main()
