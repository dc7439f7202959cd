"""A fuzzer of the operations, held against oracles in NumPy: ``make fuzz-ops``."""
