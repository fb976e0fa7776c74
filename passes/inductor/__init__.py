"""All that is known of inductor: the order of its kernels, what it fuses, how it keeps masks, the memory that it takes.

Comes in: finished halves, and inductor's kernels before code is generated. Goes out: halves rewritten for it, an order
of kernels, and the peak of what it has made.

Imports: torch_private, shared, graph, sizes, rewrites, prices, memory, search, budgets, plans, ranges, write
"""
