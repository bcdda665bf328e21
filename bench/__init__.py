"""ReuseBench: the benchmark and evaluation suite for reuse in LLM inference.

This package holds the contracts that everything else meets. It imports nothing from the other
top-level packages (only :mod:`bench.cli` may, lazily), and importing it is cheap.
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
