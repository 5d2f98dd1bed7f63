"""Types, protocols and helpers that are independent of any method."""
