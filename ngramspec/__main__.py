"""`python -m ngramspec` is the `ngramspec` command."""

from ngramspec.cli.main import run_command

if __name__ == "__main__":
    run_command()
