"""What a generator says when it is not made for a problem."""


class DoesNotApply(Exception):
    """The schedule is not defined for this problem. The message says why, as the end of 'it ...'."""


class DoesNotFit(DoesNotApply):
    """The schedule adapts to the memory, but needs more than there is. The message is the end of 'it ...'."""
