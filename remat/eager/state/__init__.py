"""What a forward reads and changes beside its arguments, put back for its recomputation: tensors, generators, modes.

Imports: passes, eager.types
"""
