"""What a generator says when it is not made for a problem."""


class DoesNotApply(Exception):
    """The schedule is not defined for this problem. The message says why, as the end of 'it ...'."""
