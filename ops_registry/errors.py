"""The few exceptions of the package; everything else is a plain ValueError or TypeError."""


class UnknownTargetError(ValueError):
    """A target name that nobody registered."""


class NoKernelError(ValueError):
    """The call is legal, but no kernel of the selected target serves it."""


class GradientError(RuntimeError):
    """A gradient was executed that the operator does not have."""


class KernelUnavailableError(RuntimeError):
    """A kernel found out that it cannot run here, before it wrote anything.

    Its refusal says so from then on; the call goes to the kernel after it.
    """
