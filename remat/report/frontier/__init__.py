"""The frontier of time against peak: plans for ever smaller budgets.

Imports: passes, eager, regions, compiled, report.data, report.forms
"""
