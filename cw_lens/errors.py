"""Errors that a person can act on; the command line prints their message and nothing else."""

from collections.abc import Collection
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


class CWLensWarning(UserWarning):
    """Base of every warning that cw_lens gives."""
