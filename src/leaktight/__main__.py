"""`python -m leaktight`."""

from leaktight.cli.app import main

if __name__ == "__main__":
    main()
