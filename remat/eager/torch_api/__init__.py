"""Every name of torch.utils.checkpoint, with torch's signatures, over this engine.

Imports: passes, eager.types, eager.state, eager.offload, eager.selective, eager.recompute
"""
