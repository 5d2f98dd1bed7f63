"""Cryptography: what lets a server compute without seeing. Primitives come from the `cryptography` package."""
