"""`python -m benchmarks.record …` is `python -m tools.record …`: nothing of it is measured."""

from tools.record import main

if __name__ == "__main__":
    main()
