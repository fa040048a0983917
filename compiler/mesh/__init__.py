"""Named strided grids: the one algebra under meshes of workers, hosts, processes, actors and values.

errors     MeshDimError, MeshIndexError, MeshShapeError: the same mistakes are the same errors on every mesh
shape      Extent, Point, NDSlice, Shape: names, places, and which ranks a grid covers
algebra    MeshAlgebra: what every mesh offers of it (`slice`, `split`, `flatten`, `rename`, `size`, …)
"""

from monarch.compiler.mesh.algebra import MeshAlgebra
from monarch.compiler.mesh.errors import MeshDimError, MeshIndexError, MeshShapeError
from monarch.compiler.mesh.shape import Extent, NDSlice, Point, Shape, check_dims, named_sizes

__all__ = [
    "Extent",
    "MeshAlgebra",
    "MeshDimError",
    "MeshIndexError",
    "MeshShapeError",
    "NDSlice",
    "Point",
    "Shape",
    "check_dims",
    "named_sizes",
]
