"""Train on Parquet files that DuckDB filters and joins, stop, and go on where it stopped. Needs monarchc[data]."""

from __future__ import annotations

import tempfile

import duckdb
import monarch
import torch
import torch.nn.functional as F
from monarch.distributed import Mesh

QUERY = """
    SELECT a, b, a * scale + 3 * b AS label
    FROM '{0}/rows-*.parquet' JOIN '{0}/shops.parquet' USING (shop)
    WHERE a > -0.9 ORDER BY id
"""


def main() -> None:
    folder, database = tempfile.mkdtemp(), duckdb.connect()
    database.sql("SELECT range AS shop, 2.0 AS scale FROM range(10)").write_parquet(f"{folder}/shops.parquet")
    for part in range(4):
        rows = f"SELECT range + {part} * 2500 AS id, range % 10 AS shop, sin(id)::FLOAT AS a, cos(id)::FLOAT AS b"
        database.sql(f"{rows} FROM range(2500)").write_parquet(f"{folder}/rows-{part}.parquet")

    mesh = Mesh(data=2)
    weight = monarch.distribute(torch.zeros(2), mesh).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.1)

    @monarch.program
    def train_step(a: torch.Tensor, b: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(torch.stack((a, b), 1) @ weight, label.float())
        loss.backward()
        optimizer.step()
        return loss

    def stream() -> monarch.data.Stream:
        source = monarch.data.query(QUERY.format(folder), database)
        return monarch.data.stream(source, mesh, "[@data]", batch=500, shuffle=7, epochs=4, last="drop")

    with stream() as batches:
        losses = [train_step(**next(batches)) for _ in range(20)]
        state = batches.state_dict()
    print(f"stopped in epoch {state['epoch']}, after {state['row']:,} of its rows: loss {losses[-1].item():.4f}")

    with stream() as batches:
        batches.load_state_dict(state)
        for batch in batches:
            train_step(**batch)
    print(f"after epoch {batches.epoch}: weight {[round(each, 3) for each in weight.detach().tolist()]}")


if __name__ == "__main__":
    main()
