"""What the package says when the input is wrong, or when an experiment cannot go on."""


class InputError(ValueError):
    """Bad input from a person: one sentence that names the thing and the way out. The command line exits with 2."""


class Failed(Exception):
    """An experiment that cannot go on; the others can. The command line exits with 1."""
