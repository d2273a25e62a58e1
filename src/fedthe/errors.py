"""What the package says when the input is wrong."""


class InputError(ValueError):
    """Bad input from a person: one sentence that names the thing and the way out. The command line exits with 2."""
