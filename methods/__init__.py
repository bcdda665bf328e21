"""Methods under test: one module each, and the parts that several share."""
