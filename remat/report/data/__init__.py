"""What a report knows of one joint graph: plain data that can be stored and read back.

Imports: passes, eager, regions, compiled
"""
