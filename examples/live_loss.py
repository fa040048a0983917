"""A Marimo notebook: the mesh, and the loss while a model trains. To see it: marimo edit examples/live_loss.py"""

import marimo

app = marimo.App()


@app.cell
def _():
    import marimo as mo
    import monarch
    import torch
    from monarch.distributed import Mesh

    mesh = Mesh(data=2)
    mo.output.append(mesh)  # a grid of workers
    return mesh, mo, monarch, torch


@app.cell
def _(mesh, monarch, torch):
    torch.manual_seed(0)
    weight = monarch.distribute(torch.zeros(8), mesh).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.3)
    x = torch.randn(640, 8)

    @monarch.program
    def train_step(x, y):
        optimizer.zero_grad()
        loss = (x @ weight - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    batches = monarch.data.stream((x, x.sum(1)), mesh, "[@data]", batch=64, shuffle=1, epochs=2)
    return batches, train_step


@app.cell
def _(batches, mo, train_step):
    losses = []

    def show(name, value, step):
        losses.append(value)
        mo.output.replace(mo.md(f"step {step}: {name} **{value:.4f}**"))

    for batch in batches:
        show("loss", train_step(*batch).item(), len(losses))
    print(f"loss {losses[0]:.3f}, after {len(losses)} steps {losses[-1]:.3f}")
    return (losses,)


if __name__ == "__main__":
    app.run()
