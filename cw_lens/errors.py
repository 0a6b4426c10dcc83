"""Errors that a person can act on; the command line prints their message and nothing else."""

from collections.abc import Collection, Iterable
from typing import Any


class CWLensError(Exception):
    """Base of every error that cw_lens raises: says what, where and what to do."""


class InputError(CWLensError, ValueError):
    """An argument that cannot be right; the message names the valid ones."""


def require_known(what: str, value: Any, known: Collection[str]) -> None:
    """Refuses a value that is none of the names known, whatever its type.

    Raises:
        InputError: naming those that are.
    """
    if not isinstance(value, str) or value not in known:
        raise InputError(f"unknown {what} {value!r}; there are {', '.join(known)}.")


def spans(numbers: Iterable[int]) -> str:
    """Whole numbers as a person says them, runs joined: "0 to 3, 7, 9 to 12"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in runs)


class CWLensWarning(UserWarning):
    """Base of every warning that cw_lens gives."""
