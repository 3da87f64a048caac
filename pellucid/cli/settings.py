"""Dotted settings on the command line: ``--train.steps 100``, ``--train.steps=100``, ``--train.compile``."""


def split_settings(argv: list[str]) -> tuple[list[str], dict[str, str]]:
    """Separate dotted settings from the other arguments; a setting without a value means true."""
    rest: list[str] = []
    settings: dict[str, str] = {}
    i = 0
    while i < len(argv):
        key, equals, value = argv[i].partition("=")
        if not (key.startswith("--") and "." in key and "/" not in key):
            rest.append(argv[i])
        elif equals:
            settings[key[2:]] = value
        elif i + 1 < len(argv) and not argv[i + 1].startswith("--"):
            settings[key[2:]] = argv[i + 1]
            i += 1
        else:
            settings[key[2:]] = "true"
        i += 1
    return rest, settings
