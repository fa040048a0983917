"""A mixture of experts: each worker has one expert, and tokens go to their experts and back by all_to_all."""

import monarch
import torch
import torch.nn.functional as F
from monarch.distributed import Mesh

mesh = Mesh(expert=4)
TOKENS, WIDTH, EXPERTS = 32, 8, mesh.size("expert")
CAPACITY = TOKENS // EXPERTS  # tokens that a worker sends to each expert at most: enough for all of its own


def route(x: torch.Tensor, router: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate, expert = (x @ router).softmax(-1).max(-1)
    return gate, F.one_hot(expert, EXPERTS).to(x.dtype)


def dispatch(x: torch.Tensor, router: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The layer on a worker: [tokens / 4, width] of its own tokens, and the [1, width, width] of its expert."""
    gate, chosen = route(x, router)
    place = (chosen.cumsum(0) * chosen).sum(-1).long() - 1  # a token's number among those that I send to its expert
    slots = chosen[:, :, None] * F.one_hot(place, CAPACITY).to(x.dtype)[:, None, :]  # [token, expert, slot]
    sent = torch.einsum("tes,td->esd", slots, x)
    received = monarch.all_to_all(sent, "expert")  # [worker, slot, width], all for my expert
    computed = monarch.all_to_all((received @ weight[0]).relu(), "expert")  # what the experts made of mine
    return gate[:, None] * torch.einsum("tes,esd->td", slots, computed)


layouts = ("[@expert, -]", None, "[@expert, -, -]")
mixture = monarch.local(dispatch, in_layouts=layouts, out_layouts="[@expert, -]", mesh=mesh)

torch.manual_seed(0)  # sums in another order differ by rounding, which some numbers take beyond what is compared
x, router, weight = torch.randn(TOKENS, WIDTH), torch.randn(WIDTH, EXPERTS), torch.randn(EXPERTS, WIDTH, WIDTH)
dense = [tensor.clone().requires_grad_() for tensor in (x, router, weight)]
gate, chosen = route(*dense[:2])
expected = gate[:, None] * torch.einsum("te,td,edf->tef", chosen, dense[0], dense[2]).relu().sum(1)
expected.square().sum().backward()

placed = [
    monarch.distribute(tensor, mesh, layout).requires_grad_()
    for tensor, layout in zip((x, router, weight), ("[@expert, -]", "[-, -]", "[@expert, -, -]"), strict=True)
]
y = mixture(*placed)
y.square().sum().backward()
torch.testing.assert_close(y.detach().full_tensor(), expected.detach())
for found, wanted in zip(placed, dense, strict=True):
    assert found.grad is not None
    torch.testing.assert_close(found.grad.full_tensor(), wanted.grad)
print("as the dense mixture, gradients included")
