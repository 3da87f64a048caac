"""Pages without outside resources: a template filled in, data that cannot break out of it, files replaced at once."""

import json
import os
from pathlib import Path
from typing import Any

from pellucid.errors import StorageError


def render(template: str, contents: dict[str, Any]) -> str:
    """A template of this folder with ``contents`` filled in, escaped.

    Two filters let text through as it is: ``embedded`` makes JSON of a value, for a script element, and ``markup``
    marks SVG and HTML whose text its maker escaped.
    """
    import jinja2  # here, so that reading a run's numbers does not load it
    from markupsafe import Markup

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["embedded"] = lambda value: Markup(embedded(value))
    environment.filters["markup"] = Markup
    return environment.get_template(template).render(contents)


def embedded(value: object) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def write_text(path: Path, text: str) -> None:
    """Put a file in place of an older one at once, durably.

    Raises:
        StorageError: it cannot be written; the older one is untouched.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StorageError(f"{path}: cannot be written ({error.strerror})") from error
