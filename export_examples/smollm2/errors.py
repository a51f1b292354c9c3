"""Problems that the command line reports as one sentence."""


class ExampleError(RuntimeError):
    """Something outside the program's code is missing or does not fit."""


class ModelFileError(ExampleError):
    """The model file is missing, or it is not one this example can run."""


class DeviceError(ExampleError):
    """The device asked for is not here, or what its packages are built with is missing."""


class NativeError(ExampleError):
    """The C++ program cannot be built, or it stopped with a message."""
