"""A report in every form: text, DOT, SVG, a page; and why a value is kept.

Imports: passes, eager, regions, compiled, report.data
"""
