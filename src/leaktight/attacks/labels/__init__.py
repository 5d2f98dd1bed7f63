"""How labels are inferred from an update."""
