"""The Formula workload: financial formulas with a numerical answer."""

from data.formula.workload import Formula

__all__ = ["Formula"]
