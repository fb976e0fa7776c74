"""The plan: all decisions of one joint graph with reasons and prices, as data that can be stored and applied again.

Comes in: a picked schedule, or a stored plan. Goes out: `Plan` and `Chosen`, which is a plan with its schedule.

Imports: torch_private, shared, graph, sizes, rewrites, prices, memory, search, budgets
"""
