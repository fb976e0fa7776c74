"""What is alive when. Schedules of nodes, whose memory each result takes, and the simulator that judges every plan.

Comes in: the joint graph and what a plan keeps. Goes out: `Schedule`, `Storages`, `Simulation` with its peak.

Imports: torch_private, shared, graph, sizes, rewrites
"""
