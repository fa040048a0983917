"""Train a small Llama on source code, and have it go on with some lines: one model, on one mesh, for both."""

import argparse
from typing import Annotated

import monarch
import torch
import torch.nn.functional as F
from monarch.distributed import Mesh
from monarch.stdlib.data import batches, corpus
from monarch.stdlib.models.llama import Llama
from monarch.stdlib.parallel import tensor_parallel

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=100, help="training steps")
parser.add_argument("--tokens", type=int, default=60, help="how many bytes to generate")
options = parser.parse_args()

mesh = Mesh(data=2, model=2)
torch.manual_seed(0)
model = Llama(vocabulary=256, width=64, layers=2, heads=4, groups=2)
layouts = tensor_parallel(model, mesh, "model")
print(layouts.why)
model = monarch.module_to_mesh(model, mesh, layouts=layouts)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
Tokens = Annotated[torch.Tensor, "i64[16@data, 64]"]


@monarch.program
def train_step(tokens: Tokens, targets: Tokens):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    return loss


for step, (tokens, targets) in enumerate(batches(corpus(200_000), batch=16, sequence=64, steps=options.steps)):
    loss = train_step(tokens, targets)
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.2f}")

prompts = [b"def forward(self, ", b"import ", b"        return "]
monarch.manual_seed(0)
found = monarch.generate(
    model, [list(prompt) for prompt in prompts], max_new_tokens=options.tokens, temperature=0.7, top_k=20, stop=[10],
    pad=32, batch_layout="[@data, -]",
)  # fmt: skip
for prompt, row in zip(prompts, found, strict=True):
    text = bytes(row.tolist()).decode(errors="replace").strip()
    print(f"{prompt.decode().strip()!r} goes on: {text!r}")
