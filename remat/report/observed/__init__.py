"""What a step really did: ops that ran, bytes that were alive, beside what was predicted.

Imports: passes, eager, regions, compiled, report.data, report.forms, report.frontier
"""
