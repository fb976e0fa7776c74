"""Policies in eager code: which results of ops are kept, recorded in forward and found again in recomputation.

Imports: passes, eager.types, eager.state, eager.offload
"""
