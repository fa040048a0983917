"""A mixture of experts over an expert mesh dim: each worker has two experts, and tokens go to theirs and back."""

from typing import Annotated

import monarch
import torch
import torch.nn.functional as F
from monarch.distributed import Mesh
from monarch.stdlib.experts import load_balancing_loss, router_logits
from monarch.stdlib.models.moe import MixtureOfExperts
from monarch.stdlib.parallel import expert_parallel

torch.manual_seed(0)
mesh = Mesh(data=2, expert=2)
SIZES = {"vocabulary": 64, "width": 32, "inner": 48, "layers": 2, "heads": 4}
Tokens = Annotated[torch.Tensor, "i64[8@(expert,data), 16]"]


def trained(model, batches, program=lambda step: step):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    @program
    def step(tokens: Tokens, targets: Tokens):
        optimizer.zero_grad()
        with router_logits(model) as logits:
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        (loss + 0.01 * load_balancing_loss(logits, chosen=2)).backward()
        optimizer.step()
        return loss

    return [step(*batch) for batch in batches]


dense = MixtureOfExperts(**SIZES, experts=4, chosen=2, room=None)  # room=None: no token is ever dropped
model = MixtureOfExperts(**SIZES, experts=4, chosen=2, room=None)
model.load_state_dict(dense.state_dict())
layouts = expert_parallel(model, mesh, "expert")
print(layouts.why)
model = monarch.module_to_mesh(model, mesh, layouts=layouts)

tokens = torch.randint(64, (20, 8, 16))
batches = [(each, (each * 5 + 1) % 64) for each in tokens]
ours, plain = trained(model, batches, monarch.program), trained(dense, batches)
for number in (0, 9, 19):
    print(f"step {number + 1}: loss {ours[number].item():.4f}, plain PyTorch's {plain[number].item():.4f}")
