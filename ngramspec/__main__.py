"""`python -m ngramspec` is the `ngramspec` command."""

from ngramspec.cli.main import main

if __name__ == "__main__":
    main()
