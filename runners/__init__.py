"""What drives: engines, the service around a method, load, and the run store."""
