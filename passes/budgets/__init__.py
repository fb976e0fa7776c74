"""What users promise: which schedule keeps within the budgets, and what is said if none does.

Comes in: the planning problem, a budget of the graph, budgets of regions. Goes out: `Picked`, or an error that says how
low one can get, which op sets that, and which policies keep it up.

Imports: torch_private, shared, graph, sizes, rewrites, prices, memory, search
"""
