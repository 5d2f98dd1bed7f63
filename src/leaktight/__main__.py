"""`python -m leaktight`."""

from leaktight.cli import main

if __name__ == "__main__":
    main()
