"""A page as a test sees it."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "img", "br", "link", "input", "hr"}
BLOCKS = {"dt", "dd", "td", "th", "li", "p", "div", "h1", "h2", "h3", "h4"}


class Page(HTMLParser):
    """Elements with their attributes, texts by element id, and whatever is left open."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[tuple[str, str | None]] = []
        self.texts: dict[str, str] = {}
        self.faults: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        if tag not in VOID:
            self.open.append((tag, attributes.get("id")))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        opened, _ = self.open.pop() if self.open else ("nothing", None)
        if opened != tag:
            self.faults.append(f"</{tag}> closes <{opened}> at {self.getpos()}")
        if tag in BLOCKS:
            self.handle_data(" ")

    def handle_data(self, data: str) -> None:
        for tag, name in self.open:
            self.texts[name or tag] = self.texts.get(name or tag, "") + data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def text(self, name: str) -> str:
        """The words inside the element with this id (or of this tag), with single spaces."""
        return " ".join(self.texts.get(name, "").split())

    @property
    def ids(self) -> list[str]:
        return [name for _, attributes in self.elements if (name := attributes.get("id"))]
