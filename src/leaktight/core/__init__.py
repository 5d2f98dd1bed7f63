"""Types, protocols and helpers that know nothing of any method."""
