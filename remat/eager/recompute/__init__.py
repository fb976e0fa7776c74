"""Frames of running regions, what they saved, and the recomputation that backward asks for.

Imports: passes, eager.types, eager.state, eager.offload, eager.selective
"""
