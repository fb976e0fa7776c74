"""The command `remat`: explain, show, diff, pareto.

Imports: passes, eager, regions, compiled, report, integrations
"""
