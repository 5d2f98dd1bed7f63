"""The command line: each file parses the options of one command, calls `leaktight.api` and prints."""
