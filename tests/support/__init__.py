"""What tests and benchmarks share: programs, models, oracles, and instruments that measure."""
