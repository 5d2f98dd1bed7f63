"""The result files of a run: their types, the store of trials, the folder."""
