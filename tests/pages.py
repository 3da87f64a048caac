"""A page as tests look at it."""

import html.parser
import json
from typing import Any


class Page(html.parser.HTMLParser):
    """Parses a page strictly enough to notice a tag that is never closed, and keeps what tests ask for."""

    VOID = ("meta", "link", "br", "img", "input", "hr")

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("script", "style"):
            self.scripts.append(data)
        elif data.strip():
            self.texts.append(data.strip())

    def count(self, tag: str, name: str) -> int:
        return sum(found == tag and name in (attrs.get("class") or "").split() for found, attrs in self.tags)

    def says(self, text: str) -> bool:
        return any(text in found for found in self.texts)

    def data(self) -> Any:
        """What the page's script element of JSON holds."""
        return json.loads(next(text for text in self.scripts if text.lstrip()[:1] in ("[", "{")))
