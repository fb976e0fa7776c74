"""Compilation: options, machine constants, agreement between ranks, the backend and the partition function.

Comes in: Dynamo graphs and what users ask for. Goes out: compiled code, split by `passes.pipeline.run`. Who wants to
see the plans is handed in as a watcher.

Imports: passes, eager, regions
"""
