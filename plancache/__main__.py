"""`python -m plancache` is the command line."""

from plancache.cli import main

if __name__ == "__main__":
    main()
