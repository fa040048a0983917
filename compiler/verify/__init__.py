"""The verifier: whether a graph is well formed. Runs between passes where MONARCH_VERIFY=1."""

from __future__ import annotations

from monarch.compiler.graph import Graph
from monarch.compiler.passes.predicates import AgreeOnPredicates, disagreeing
from monarch.compiler.verify.one import Verifier
from monarch.compiler.verify.run import Run
from monarch.compiler.verify.several import Parts


def verify(graph: Graph, after: str = "", *, run: bool = False) -> None:
    """Raise GraphError, naming the value and the pass `after` which it is wrong, unless `graph` is well formed:

    - placeholders, calls of known, pure ops with arguments that these take, then one output; values stand before uses
    - every value has a type that can lie on the mesh, and types fit along collectives and `getitem`
    - over the dims partitioned so far, operands and results lie as the ops' rules allow
    - collectives run over dims that are partitioned, and somebody reads what they give
    - regions take and give what their ops do; a predicate is whole on every worker, and in the end the same to the bit
    - states are updated with values of their own shape, dtype and layout
    - in a graph of several meshes a value is computed from values of its own mesh, a transfer brings what another mesh
      has as it is, and the graph of each part is well formed

    `run` also computes each op's result on tensors without data of one worker's shapes, and compares (slower: some
    0.2 ms an op).
    """
    if graph.parts:
        Parts(graph, after).verify(lambda part: verify(part, after, run=run))
        return
    Verifier(graph, after).verify()
    if after == AgreeOnPredicates.name and (node := disagreeing(graph)) is not None:
        Verifier(graph, after).fail("has a predicate that workers may round differently: no one tells them", node)
    if run:
        Run(graph, after).run()
