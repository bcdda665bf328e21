"""Experiments: one declaration per table or figure of a paper."""
