"""Libraries that train: what it takes to use remat with each.

Imports: passes, eager, regions, compiled, report
"""
