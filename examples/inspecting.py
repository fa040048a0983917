"""See what a program became: trace it, compile it, read the report, ask why, and write the inspector's page."""

import sys
from typing import Annotated

import monarch
import torch
import torch.nn.functional as F
from monarch.distributed import Mesh
from monarch.stdlib.models.gpt import MLP
from monarch.stdlib.parallel import combine, fully_shard, tensor_parallel
from torch import nn

Inputs = Annotated[torch.Tensor, "f32[64@data, 64]"]
Labels = Annotated[torch.Tensor, "i64[64@data]"]

mesh = Mesh.abstract(data=8, model=4)  # a mesh for compiling: no worker is started
model = nn.Sequential(MLP(64), nn.Linear(64, 8))
layouts = combine(tensor_parallel(model, mesh, "model"), fully_shard(model, mesh, "data"))
model = monarch.module_to_mesh(model, mesh, layouts=layouts)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


@monarch.program
def train_step(x: Inputs, labels: Labels):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), labels)
    loss.backward()
    optimizer.step()
    return loss


x, labels = torch.randn(64, 64), torch.randint(8, (64,))
graph = train_step.trace(x, labels).graph
print(f"traced: {sum(1 for _ in graph.calls)} ops, with global types")

inspection = train_step.inspect(x, labels)  # in a notebook this shows the page
print(inspection)

# The compiler's report has every value of the plan: where it comes from, how it lies, what it costs.
report = inspection.report
dearest = max(report.values, key=lambda value: value.sent)
print(f"most bytes: {dearest.name}, {dearest.sent:,} a worker, over {' and '.join(dearest.mesh_dims)}: {dearest.why}")
line = report.lines[dearest.source].strip()
print(f"for the line: {line}")

# Why a value lies as it does: the chain of causes, and what else was possible.
print(inspection.explain(dearest.name))

path = sys.argv[1] if len(sys.argv) > 1 else "page.html"
inspection.save(path)
print(f"the inspector's page lies in {path}: it needs nothing else, open it in a browser")
