"""What users write in: meshes, distributed tensors, programs."""

# These add to the recorder's table of ops that are not recorded as they are.
from monarch.language import averaging, composites, foreach, questions, random, scaling  # noqa: F401  isort: skip
from monarch.language.constrain import layout
from monarch.language.distribute import distribute, module_to_mesh
from monarch.language.errors import OperatorError
from monarch.language.mesh import Mesh
from monarch.language.program import Program, Traced, program
from monarch.language.random import manual_seed
from monarch.language.tensor import DistributedTensor

__all__ = [
    "DistributedTensor",
    "Mesh",
    "OperatorError",
    "Program",
    "Traced",
    "distribute",
    "layout",
    "manual_seed",
    "module_to_mesh",
    "program",
]
