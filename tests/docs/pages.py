"""What the pages of the API reference say, for tests."""

import html.parser
import pathlib


class Page(html.parser.HTMLParser):
    """One page.

    Args:
        path: `pathlib.Path` of the HTML file.

    Attributes:
        path: As given.
        texts: Dict of docstrings' text by the id of their entry; that of the
            module has the id `""`.
        names: Set of all ids.
        links: List of the addresses that it links to.
        codes: List of (text, whether it is a link) of what docstrings have
            in backticks.
    """

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__()
        self.path = path
        self.texts = {"": ""}
        self.names = set()
        self.links = []
        self.codes = []
        self._entry = ""
        self._open = []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if "id" in attrs:
            self.names.add(attrs["id"])
        if "href" in attrs:
            self.links.append(attrs["href"])
        if tag == "section" or "classattr" in attrs.get("class", ""):
            self._entry = attrs.get("id", "")
            self.texts.setdefault(self._entry, "")
        if tag not in {"br", "hr", "img", "input", "link", "meta"}:
            self._open.append((tag, attrs.get("class", "")))
        if tag == "code":
            self.codes.append(["", False])
        if tag == "a" and self._is_in("code"):
            self.codes[-1][1] = True

    def handle_endtag(self, tag):
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        if ("div", "docstring") in self._open:
            self.texts[self._entry] += data
            if self._is_in("code"):
                self.codes[-1][0] += data

    def _is_in(self, tag):
        return any(name == tag for name, _ in self._open)
