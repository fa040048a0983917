"""From a group of a graph's ops to the nest of loops that computes them.

The method is define-by-index: the value of an op at an index is an expression of its operands' values at indices that
follow from it. A view only rewrites the index; a reduction binds the nest's reduced dims; a value outside the group is
loaded. Whatever cannot be said so is `Unfusable`, and then it is no group.
"""

from monarch.compiler.kernels.lower.coordinates import Unfusable
from monarch.compiler.kernels.lower.group import FusionGroup, Space, lower_group, space_of
from monarch.compiler.kernels.lower.values import LoweringContext, Tensors

__all__ = ["LoweringContext", "FusionGroup", "Space", "Tensors", "Unfusable", "lower_group", "space_of"]
