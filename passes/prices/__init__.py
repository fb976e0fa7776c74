"""What it costs to keep a value, and to compute it again, in ticks of time.

Comes in: the joint graph, sizes, a cost model and the constants of machines. Goes out: `Costs`, one pair per node.

Imports: torch_private, shared, graph, sizes
"""
