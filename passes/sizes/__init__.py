"""Sizes that are symbols: the numbers they stand for while one plans, and what depends on them as expressions.

Comes in: nodes with symbolic shapes. Goes out: `Sizes`, which knows a number for every size, and texts for reports.

Imports: torch_private, shared, graph
"""
