"""What runs on this thread, what goes wrong, and the protocols by which the engine's parts know each other.

Imports: passes
"""
