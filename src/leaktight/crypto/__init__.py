"""Homomorphic encryption and secure sums. Primitives are those of the `cryptography` package."""
