"""For which sizes a plan holds: where a budget in bytes ends, and what a plan costs at other sizes.

Comes in: a prepared graph with symbols and a request. Goes out: a chosen plan with guards, and rows for reports.

Imports: torch_private, shared, graph, sizes, rewrites, prices, memory, search, budgets, plans
"""
