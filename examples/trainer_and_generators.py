"""A trainer and two generators on meshes of their own: after each step both get the new parameters, and write on."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated

import monarch
import torch
import torch.nn.functional as F
from monarch import Mesh
from monarch.stdlib.models.llama import Llama
from monarch.stdlib.parallel import fully_shard

torch.manual_seed(0)
STEPS = 12
SIZES = {"vocabulary": 16, "width": 32, "inner": 48, "layers": 1, "heads": 2}
Tokens = Annotated[torch.Tensor, "i64[16@data, 8]"]

root = Mesh(worker=4)
trainers = root.slice(worker=slice(0, 2)).rename(worker="data")
readers = [root.slice(worker=slice(2, 3)), root.slice(worker=slice(3, 4))]

trainer = Llama(**SIZES)
trainer = monarch.module_to_mesh(trainer, trainers, fully_shard(trainer, trainers, "data"))
optimizer = torch.optim.AdamW(trainer.parameters(), lr=0.01)
half = torch.bfloat16  # generators have their own layouts and dtype
generators = [monarch.module_to_mesh(Llama(**SIZES).to(half), mesh, {"*": None}) for mesh in readers]


@monarch.program
def train(tokens: Tokens, targets: Tokens):
    optimizer.zero_grad()
    loss = F.cross_entropy(trainer(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    return loss


def write(each):  # in a thread of its own: the trainer goes on meanwhile
    tokens = monarch.generate(generators[each], [[each, each + 3]], max_new_tokens=4)
    return f"generator {each}, version {monarch.version(generators[each])}: {tokens[0].tolist()}"


with ThreadPoolExecutor() as pool:
    writing: list[Future[str]] = []
    losses = []
    for number in range(1, STEPS + 1):
        start = torch.randint(16, (16, 1))
        text = (start + 3 * torch.arange(9)) % 16  # each token is the last one plus 3
        losses.append(train(text[:, :-1], text[:, 1:]))  # beside what the generators write
        for line in [each.result() for each in writing]:
            print(line)
        for generator in generators:
            monarch.sync(trainer, generator, version=number)  # returns at once: workers send it behind the step
        writing = [pool.submit(write, each) for each in range(2)] if number % 4 == 0 else []
    print(*[each.result() for each in writing], f"loss {losses[-1].item():.2f}", sep="\n")
