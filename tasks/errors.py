"""The one exception a user is meant to read."""

from __future__ import annotations

USER_ERROR_EXIT_CODE = 2
# The train stage was told to stop and has saved: run it again to go on (EX_TEMPFAIL of sysexits.h).
PREEMPTED_EXIT_CODE = 75


class UserError(ValueError):
    """A mistake in the user's input: one sentence with the value, the rule and the way out.

    A stage that ends in it exits with code 2 and is never retried.
    """

    def __str__(self) -> str:
        # A file's bytes that are not UTF-8 would end whatever writes the sentence down.
        return super().__str__().encode("utf-8", "backslashreplace").decode()
