"""A mutation fuzzer of every file that jllama reads. From the repository's root:

    PYTHONPATH=tests python -m fuzz run --seconds 480        # goes on from where it was
    PYTHONPATH=tests python -m fuzz report                   # cases, and findings by place
    PYTHONPATH=tests python -m fuzz case FORMAT NUMBER       # one case here, with its traceback

`seeds` makes small good files, `damage` damages them, `oracles` reads the result and says whether the ending is
allowed: success with sizes that the file can hold, or one of the project's errors with a short printable line; within
5 seconds and a multiple of the file's size in memory. FUZZ_WORK is its folder (a temporary one).
"""
