"""Runs jllama from a clone: `python main.py --checkpoint=model.bin`. The same as the console script `jllama`."""

from jllama.cli import run

if __name__ == "__main__":
    run()
