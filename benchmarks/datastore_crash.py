"""`python -m benchmarks.datastore_crash …` is `python -m tools.store_crash …`: nothing of it is measured."""

from tools.store_crash import main

if __name__ == "__main__":
    main()
