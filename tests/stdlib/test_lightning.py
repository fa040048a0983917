"""Modules and loops of Lightning on a mesh, unchanged: the losses are Lightning's on one process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from monarch.distributed import DistributedTensor, Mesh
from monarch.stdlib.parallel import fully_shard
from tests.later import Later

lightning, strategies, torchmetrics = Later("lightning", "pytorch"), Later("monarch.lightning"), Later("torchmetrics")

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice, and what it uses of old PyTorch


@cache
def classifier() -> Any:
    """A class of modules, which needs Lightning."""

    class Classifier(lightning.LightningModule):
        """As people write them."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
            self.losses: list[torch.Tensor] = []

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.log("loss", loss, on_epoch=True)
            self.losses.append(loss.detach())
            return loss

        def validation_step(self, batch: Any, number: int) -> None:
            x, y = batch
            self.log("val", F.cross_entropy(self.net(x), y))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}

    return Classifier


def loader(shuffle: bool = True) -> DataLoader[Any]:
    """Three batches and one that the mesh does not divide."""
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(55, 8), torch.randint(4, (55,))), batch_size=16, shuffle=shuffle)


def fit(strategy: Any, folder: Path, epochs: int, checkpoint: str | None = None) -> Any:
    module = classifier()()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_epochs=epochs,
        gradient_clip_val=0.5,
        accumulate_grad_batches=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[lightning.pytorch.callbacks.ModelCheckpoint(folder, "{epoch}", monitor="val", save_top_k=-1)],
    )
    torch.manual_seed(5)
    trainer.fit(module, loader(), loader(shuffle=False), ckpt_path=checkpoint, weights_only=False)
    return module


def same(ours: Any, theirs: Any) -> None:
    found, expected = (torch.stack([torch.as_tensor(float(loss)) for loss in each.losses]) for each in (ours, theirs))
    torch.testing.assert_close(found, expected)
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert isinstance(mine, DistributedTensor), name
        torch.testing.assert_close(mine.detach().full_tensor(), other.detach())


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with Mesh(data=2) as made:
        yield made


@pytest.mark.sample(1)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_module_trains_unchanged_and_goes_on_from_its_checkpoint(sharded: bool, mesh: Mesh, tmp_path: Path) -> None:
    def strategy() -> Any:
        return strategies.MeshStrategy(mesh, (lambda module: fully_shard(module, mesh, "data")) if sharded else None)

    theirs = fit("auto", tmp_path / "theirs", 2)
    ours = fit(strategy(), tmp_path / "ours", 2)
    same(ours, theirs)
    (path,) = (tmp_path / "ours").glob("epoch=1.ckpt")
    saved = torch.load(path, weights_only=False)["state_dict"]
    assert {type(each) for each in saved.values()} == {torch.Tensor}
    plain = fit("auto", tmp_path / "plain", 3, str(path))  # Lightning reads what we wrote, and we go on from it too
    same(fit(strategy(), tmp_path / "again", 3, str(path)), plain)


def test_a_fabric_loop_is_the_same(mesh: Mesh, tmp_path: Path) -> None:
    def losses(strategy: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy=strategy)
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
        batches = fabric.setup_dataloaders(loader())
        assert len(batches) == 4
        torch.manual_seed(3)
        found = []
        for _ in range(2):
            for x, y in batches:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                fabric.backward(loss)
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                found.append(loss.item())
        fabric.save(tmp_path / "saved.ckpt", {"model": model, "optimizer": optimizer})
        return found, torch.load(tmp_path / "saved.ckpt", weights_only=True)["model"]

    theirs, expected = losses("auto")
    ours, saved = losses(strategies.FabricMeshStrategy(mesh))
    assert ours == pytest.approx(theirs, rel=1e-5)
    torch.testing.assert_close(saved, expected)


def test_batches_come_in_the_layout_that_is_asked_for(mesh: Mesh) -> None:
    fabric = lightning.Fabric(
        accelerator="cpu", devices=1, strategy=strategies.FabricMeshStrategy(mesh, batch="[-, @data]")
    )
    for x, _ in fabric.setup_dataloaders(DataLoader(TensorDataset(torch.ones(4, 2), torch.ones(4, 2)), batch_size=4)):
        assert isinstance(x, DistributedTensor) and str(x.sharding) == "[-, @data]"


def test_metrics_count_as_without_a_mesh(mesh: Mesh) -> None:
    """Those of torchmetrics keep what they count as attributes, some of which they change in place."""

    class Measured(classifier()):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=4)
            self.mean = torchmetrics.MeanMetric()
            self.confused = torchmetrics.MetricCollection([torchmetrics.ConfusionMatrix("multiclass", num_classes=4)])

        def validation_step(self, batch: Any, number: int) -> None:
            x, y = batch
            out = self.net(x)
            self.accuracy(out, y)
            self.mean(F.cross_entropy(out, y))
            self.confused.update(out, y)
            self.log_dict({"accuracy": self.accuracy, "mean": self.mean})

        def on_validation_epoch_end(self) -> None:
            self.log("right", self.confused.compute()["MulticlassConfusionMatrix"].trace().float())
            self.confused.reset()

    found = []
    for strategy in ("auto", strategies.MeshStrategy(mesh)):
        options = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        trainer = lightning.Trainer("cpu", devices=1, strategy=strategy, logger=False, max_epochs=2, **options)
        trainer.fit(Measured(), loader(), loader())
        found.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    assert found[0] == pytest.approx(found[1], abs=1e-5) and {"accuracy", "mean", "right"} <= found[0].keys()
