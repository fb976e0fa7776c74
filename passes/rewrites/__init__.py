"""What is changed in the joint graph before it is planned; every bit that the step computes stays.

Decides nothing about values: it gives planning better ones to decide about. A mask apart from its dropout, a gradient
in the layout that autograd takes over, a stand-in for what leaves a region.

Imports: torch_private, shared, graph, sizes
"""
