"""Functions of recipes whose tables neither an audit nor a training can make."""
