"""The command line: each file parses one command, calls what does the work, and prints."""
