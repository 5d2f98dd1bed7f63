"""Images of words, for text recognition."""
