"""The one error that a user can cause."""


class InputError(ValueError):
    """Input that cannot be used. One line: the place (file:line or key), the numbers, the nearest legal value."""
