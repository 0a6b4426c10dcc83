"""Errors that a person can act on; the command line prints their message and nothing else."""


class CWLensError(Exception):
    """Base of every error that cw_lens raises: says what, where and what to do."""


class InputError(CWLensError, ValueError):
    """An argument that cannot be right; the message names the valid ones."""


class CWLensWarning(UserWarning):
    """Base of every warning that cw_lens gives."""
