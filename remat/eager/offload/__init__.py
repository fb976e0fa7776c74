"""Tensors that wait for backward in host memory or on disk, and the hooks that send them there.

Imports: passes, eager.types, eager.state
"""
