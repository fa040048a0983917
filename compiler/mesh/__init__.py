"""Named strided grids: the one algebra under meshes of workers, hosts, processes, actors and values.

shape      Extent, Point, NDSlice, Shape: names, places, and which ranks a grid covers
algebra    MeshAlgebra: what every mesh offers of it (`slice`, `split`, `flatten`, `rename`, `size`, …)
"""

from monarch.compiler.mesh.algebra import MeshAlgebra
from monarch.compiler.mesh.shape import Extent, NDSlice, Point, Shape

__all__ = ["Extent", "MeshAlgebra", "NDSlice", "Point", "Shape"]
