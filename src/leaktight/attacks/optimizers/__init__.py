"""Optimisers of an attack's loss, and the tracing of their iterations."""
