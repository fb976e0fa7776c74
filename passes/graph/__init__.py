"""The joint graph as planning sees it: equal computations merged, roles for nodes, what may be done with each value.

Decides which values may be kept, which may be recomputed, and gives a reason where one may not. Comes in: the FX graph
that AOTAutograd has traced. Goes out: `JointGraph` and `Constraints`.

Imports: torch_private, shared
"""
