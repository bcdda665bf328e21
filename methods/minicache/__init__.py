"""MiniCache: routing, entries made in the background, and hits by extraction and execution."""

from methods.minicache.method import MiniCache

__all__ = ["MiniCache"]
