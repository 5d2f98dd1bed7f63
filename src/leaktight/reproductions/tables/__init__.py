"""Tables of publications that are neither an audit nor a training: functions that give values by row and column."""
