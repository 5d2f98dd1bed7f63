"""One executor for the clients of a round, the restarts of an attack and the trials of an audit."""
