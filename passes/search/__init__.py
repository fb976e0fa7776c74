"""From prices and memory to schedules. Proposers propose, the simulator disposes.

Comes in: the planning problem and its storages. Goes out: offers, each a schedule with its simulation and its time.

Imports: torch_private, shared, graph, sizes, rewrites, prices, memory
"""
