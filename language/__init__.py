"""The language: meshes, distributed tensors, programs."""

# These add to the recorder's table of ops that are not recorded as they are, to PyTorch's optimizers, torch.compile and
# the full state of torch.distributed.checkpoint.
from monarch.language.optimizers import averaging, scaling, schedules  # noqa: F401  isort: skip
from monarch.language.recorder import branchless, composites, determinants, foreach, forms  # noqa: F401  isort: skip
from monarch.language.recorder import higher_order, questions, random, recurrent  # noqa: F401  isort: skip
from monarch.language.programs import dynamo, swapped  # noqa: F401  isort: skip
from monarch.language.tensors import data, gathered  # noqa: F401  isort: skip
from monarch.compiler.plan import CompileOptions
from monarch.language.eager.flush import discard, flush
from monarch.language.errors import OperatorError
from monarch.language.placing.distribute import distribute, module_to_mesh
from monarch.language.placing.dtensors import from_dtensor, to_dtensor
from monarch.language.placing.healing import MeshFailure, Shrink, heal_mesh
from monarch.language.placing.resizing import resize_mesh
from monarch.language.placing.shards import from_shards
from monarch.language.programs.program import Program, program
from monarch.language.recorder.constrain import constrain, layout
from monarch.language.recorder.control import cond, while_loop
from monarch.language.recorder.dispatch import clone, dispatch, zeros
from monarch.language.recorder.random import manual_seed
from monarch.language.recorder.reading import read_item, read_known, read_truth
from monarch.language.recorder.recording import is_tracing
from monarch.language.recorder.scan import scan
from monarch.language.recorder.selecting import put, selected
from monarch.language.recorder.transfer import transfer
from monarch.language.recorder.varying import plainly, position
from monarch.language.tensors.mesh import Mesh
from monarch.language.tensors.operations import operations
from monarch.language.tensors.tensor import DistributedTensor
from monarch.language.workers.collectives import all_gather, all_to_all, permute, reduce, reduce_scatter, vary
from monarch.language.workers.local import activate, local
from monarch.language.workers.slices import slice_mesh, to_mesh

__all__ = [
    "DistributedTensor",
    "Mesh",
    "MeshFailure",
    "OperatorError",
    "Program",
    "Shrink",
    "all_gather",
    "all_to_all",
    "cond",
    "distribute",
    "from_dtensor",
    "heal_mesh",
    "layout",
    "local",
    "manual_seed",
    "module_to_mesh",
    "permute",
    "program",
    "reduce",
    "reduce_scatter",
    "resize_mesh",
    "vary",
    "scan",
    "while_loop",
]

operations.activate = activate
operations.dispatch = dispatch
operations.clone = clone
operations.zeros = zeros
operations.constrain = constrain
operations.read_item = read_item
operations.read_known = read_known
operations.read_truth = read_truth
operations.is_tracing = is_tracing
operations.discard = discard
operations.flush = flush
operations.adopt = from_shards
operations.plainly = plainly
operations.position = position
operations.put = put
operations.reduce = reduce
operations.selected = selected
operations.slice_mesh = slice_mesh
operations.to_dtensor = to_dtensor
operations.to_mesh = to_mesh
operations.transfer = transfer
operations.program = lambda function, mesh: Program(function, mesh, CompileOptions())
