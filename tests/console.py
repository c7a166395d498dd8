"""What the tests of the command line share."""

from collections.abc import Callable

Run = Callable[..., tuple[int, str, str]]  # the fixture `run`: arguments to exit code, stdout, stderr


def error(result: tuple[int, str, str]) -> str:
    """Return the one line of an error: exit code 1, nothing on stdout, no traceback."""
    code, out, err = result
    assert (code, out) == (1, ""), result
    assert err.startswith("jllama: ")
    assert err.count("\n") == 1, err
    return err
