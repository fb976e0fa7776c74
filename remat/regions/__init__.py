"""Marked code: `@checkpoint_region`, policies, names and wrappers, and how a region gets into a traced graph.

Comes in: functions and modules with options. Goes out: calls of the eager engine, or while torch traces, an operator
of ours with region, policy and name on each node.

Imports: passes, eager
"""
