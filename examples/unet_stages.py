"""A U-Net in three stages: what goes down is read again on the way up, past the stage between."""

import monarch
import torch
import torch.nn.functional as F
from monarch import Mesh
from monarch.stdlib.pipeline import pipeline
from torch import nn


class UNet(nn.Module):
    def __init__(self, channels=8):
        super().__init__()
        self.enter = nn.Conv2d(1, channels, 3, padding=1)
        self.down = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.middle = nn.Sequential(
            nn.Conv2d(2 * channels, 2 * channels, 3, padding=1), nn.GroupNorm(4, 2 * channels), nn.SiLU()
        )
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.leave = nn.Conv2d(2 * channels, 1, 3, padding=1)

    def forward(self, x):
        skip = F.silu(self.enter(x))
        h = F.silu(self.down(skip))
        h = h + self.middle(h)
        return self.leave(torch.cat([self.up(h), skip], 1))  # skip comes from the first stage


torch.manual_seed(0)
mesh = Mesh(pipe=3)
pipe = pipeline(UNet(), mesh, split_at=["middle", "up"], microbatches=4, schedule="1f1b")
optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)


@monarch.program
def step(noisy: torch.Tensor, clean: torch.Tensor):
    optimizer.zero_grad()
    loss = pipe.step(noisy, target=clean, loss_fn=F.mse_loss)
    optimizer.step()
    return loss


clean = torch.zeros(8, 1, 8, 8)
clean[:, :, 2:6, 2:6] = 1
noisy = clean + 0.5 * torch.randn(8, 1, 8, 8)
for number in range(20):
    loss = step(noisy, clean)
    if number % 10 == 9:
        print(f"step {number + 1}: loss {loss.item():.3f}")
print(step.inspect(noisy, clean).plan.costs["transfers"])
print(pipe.timetable)
