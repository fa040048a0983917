"""Tensors on a mesh: eight local workers, and arithmetic that looks local."""

import monarch
import torch
from monarch.distributed import Mesh

mesh = Mesh(shape=(4, 2), mesh_dim_names=("data_parallel", "model_parallel"))  # or Mesh(data=4, model=2)
print(mesh.size())

x = monarch.distribute(torch.randn(1024, 1024), mesh, sharding_spec=["data_parallel", None])
y = x @ x.T  # looks local, runs on the mesh
print(y.shape, y.full_tensor().shape)

torch.testing.assert_close(y.full_tensor(), x.full_tensor() @ x.full_tensor().T)
