"""`python -m ngramspec` is the `ngramspec` command."""

from .cli import main

if __name__ == "__main__":
    main()
