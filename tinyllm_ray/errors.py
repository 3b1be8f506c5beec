"""Exit statuses, and the exceptions that carry one.

The user's mistake is a `ConfigError`; a study without a believable result is a `NoResultError`; everything else that
escapes is our own bug and exits with 1. Standard library only: the supervisor imports this module.
"""

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_USER = 2
EXIT_NO_RESULT = 3
EXIT_SIGINT = 130
EXIT_SIGTERM = 143


class TinyllmRayError(Exception):
    """Base of the errors whose message is meant for the user, on one line."""

    exit_status = EXIT_BUG


class ConfigError(TinyllmRayError):
    """The user's mistake: the message holds the value, what is allowed and what to change."""

    exit_status = EXIT_USER


class NoResultError(TinyllmRayError):
    """The run ended without a figure that can be believed."""

    exit_status = EXIT_NO_RESULT
