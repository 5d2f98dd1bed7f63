"""What a run writes and everybody reads, defined once: types, the store of trials, a run's folder."""
