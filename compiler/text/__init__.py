"""The text form of meshes, layouts, tensor types and graphs: one grammar, which prints and parses back exactly."""

from monarch.compiler.names import find_op, op_name
from monarch.compiler.text.parse import parse_graph, parse_layout, parse_mesh, parse_type
from monarch.compiler.text.print import print_call, print_graph, print_node, print_type

__all__ = [
    "find_op",
    "op_name",
    "parse_graph",
    "parse_layout",
    "parse_mesh",
    "parse_type",
    "print_call",
    "print_graph",
    "print_node",
    "print_type",
]
