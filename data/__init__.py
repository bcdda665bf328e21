"""Workloads: where samples come from and how a reply is graded."""
