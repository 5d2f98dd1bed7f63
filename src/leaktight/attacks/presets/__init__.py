"""Published attacks, one to a file, as compositions of the matching loop."""
