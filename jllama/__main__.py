"""Lets `python -m jllama` be the same as the console script `jllama`."""

from jllama.cli import run

if __name__ == "__main__":
    run()
