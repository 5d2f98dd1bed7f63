"""From trials to verdicts: cells, statistics, words, flags, the answer and the trade-off."""
