"""Lightning on a mesh: the module's parameters, its optimizers and its batches are distributed tensors, and everything
else is Lightning as it is, in one process. Ops run as outside of programs: recorded, and run when a value is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from lightning.fabric.strategies import SingleDeviceStrategy as FabricSingleDevice
from lightning.pytorch.strategies import SingleDeviceStrategy as TrainerSingleDevice
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torchmetrics import Metric

from monarch.language.layouts import LayoutLike
from monarch.language.placing.distribute import distribute, module_to_mesh
from monarch.language.tensors.mesh import Mesh
from monarch.language.tensors.plain import put
from monarch.language.tensors.tensor import DistributedTensor
from monarch.stdlib.data.stream import Types

ModuleLayouts = Mapping[str, Any] | Callable[[nn.Module], Mapping[str, Any]] | None


class _Placing:
    """How modules, optimizers and batches come to the mesh."""

    def __init__(self, mesh: Mesh, layouts: ModuleLayouts, batch: LayoutLike | None) -> None:
        self._mesh, self._layouts = mesh, layouts
        self._types = Types([mesh.mesh_dim_names[0]] if batch is None else batch, mesh, None)

    def place(self, module: nn.Module, optimizers: list[Optimizer]) -> None:
        """Place a module, and have optimizers update what its parameters have become."""
        before = dict(module.named_parameters(remove_duplicate=False))
        layouts = self._layouts(module) if callable(self._layouts) else self._layouts
        module_to_mesh(module, self._mesh, layouts or {})
        for each in module.modules():
            if isinstance(each, Metric):  # its counters and initial values: neither parameters nor buffers
                each._apply(self._whole)
        after = dict(module.named_parameters(remove_duplicate=False))
        placed = {id(before[name]): after[name] for name in before}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [placed.get(id(parameter), parameter) for parameter in group["params"]]

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, DistributedTensor) else distribute(tensor, self._mesh)

    def batch(self, batch: Any) -> Any:
        """A batch, nested as it may be, on the mesh: its tensors with dims in the batch's layout."""

        def on_mesh(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, DistributedTensor):
                return tensor
            return put(tensor, self._mesh, self._types.of("the batch", tensor)) if tensor.ndim else tensor

        return pytree.tree_map_only(torch.Tensor, on_mesh, batch)

    def to_mesh(self, optimizer: Optimizer) -> None:
        """Give an optimizer's loaded state the layouts of its parameters."""
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                plain = isinstance(value, torch.Tensor) and not isinstance(value, DistributedTensor)
                if plain and isinstance(parameter, DistributedTensor):
                    layout = parameter.sharding if value.shape == parameter.shape else None
                    state[name] = distribute(value, self._mesh, layout)


def _fetched(state: Any) -> Any:
    """A state with plain tensors, which every program can load."""
    return pytree.tree_map_only(DistributedTensor, lambda tensor: tensor.detach().full_tensor(), state)


class _Loader:
    """A data loader whose batches are on the mesh."""

    def __init__(self, loader: Any, placing: _Placing) -> None:
        self._loader, self._placing = loader, placing

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return map(self._placing.batch, self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)


class FabricMeshStrategy(FabricSingleDevice):
    """Fabric on a mesh:

        fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy=FabricMeshStrategy(mesh))
        model, optimizer = fabric.setup(model, optimizer)

    `layouts` are those of the module's parameters, as `module_to_mesh` takes them, or a function of the module that
    gives them (`lambda model: fully_shard(model, mesh, "data")`); None replicates them. `batch` is the layout of
    batches' first dims: the first mesh dim shards the first if it is None. What `fabric.save` writes has plain tensors.
    """

    def __init__(self, mesh: Mesh, layouts: ModuleLayouts = None, batch: LayoutLike | None = None) -> None:
        super().__init__()
        self._placing = _Placing(mesh, layouts, batch)

    def module_to_device(self, module: nn.Module) -> None:
        """Nothing: `setup_module` places it, when its optimizers are known."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Place a module on the mesh."""
        self._placing.place(module, [])
        return module

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Place a module on the mesh, and have its optimizers follow."""
        self._placing.place(module, optimizers)
        return module, optimizers, scheduler

    def process_dataloader(self, dataloader: Any) -> Any:
        """A loader of the same batches, on the mesh."""
        return _Loader(dataloader, self._placing)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The module's state, of plain tensors."""
        return dict(_fetched(dict(module.state_dict())))

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state, of plain tensors."""
        return dict(_fetched(super().get_optimizer_state(optimizer)))


class MeshStrategy(TrainerSingleDevice):
    """A Trainer on a mesh:

        trainer = lightning.Trainer(accelerator="cpu", devices=1, strategy=MeshStrategy(mesh), max_epochs=3)
        trainer.fit(module, loader)

    Options are those of `FabricMeshStrategy`. Checkpoints have plain tensors: Lightning loads them anywhere. The module
    stays on the mesh when the trainer is done.
    """

    strategy_name = "monarch_mesh"

    def __init__(self, mesh: Mesh, layouts: ModuleLayouts = None, batch: LayoutLike | None = None) -> None:
        super().__init__()
        self._placing = _Placing(mesh, layouts, batch)

    def model_to_device(self) -> None:
        """Place the module on the mesh, before its optimizers are made."""
        self._placing.place(self.model, [])

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """A batch on the mesh, once the module's own hooks have seen it."""
        return self._placing.batch(super().batch_to_device(batch, device, dataloader_idx))

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state, of plain tensors."""
        return dict(_fetched(dict(super().lightning_module_state_dict())))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state, of plain tensors."""
        return dict(_fetched(super().optimizer_state(optimizer)))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint, with plain tensors for callbacks' state, too."""
        super().save_checkpoint(_fetched(checkpoint), filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states onto the mesh."""
        super().load_optimizer_state_dict(checkpoint)
        for optimizer in self.optimizers:
            self._placing.to_mesh(optimizer)
