"""Words that both engines use: errors, policies, facts about operators, lines of source, values on disk.

Comes in: single operators, tensors, texts. Goes out: what is known of them, and exceptions that say what to do.

Imports: torch_private
"""
