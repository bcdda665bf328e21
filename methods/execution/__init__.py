"""Running model-written programs: finding them in a reply, and executing them in isolation."""

from methods.execution.executor import IsolatedExecutor
from methods.execution.extract import extract_program
from methods.execution.wire import LAYERS, Limits

__all__ = ["LAYERS", "IsolatedExecutor", "Limits", "extract_program"]
