"""What the pages of the documentation site say, for tests."""

import html.parser
import pathlib

# What a page loads itself, and where its address is.
LOADED = {"audio": "src", "iframe": "src", "img": "src", "script": "src"}
LOADED |= {"source": "src", "video": "src"}


class Page(html.parser.HTMLParser):
    """One page.

    Args:
        path: `pathlib.Path` of the HTML file.

    Attributes:
        path: As given.
        names: Set of all ids.
        links: List of the addresses that it links to.
        loaded: List of the addresses of pictures, scripts, styles and fonts.
        codes: List of the texts that are set as code.
        texts: Dict of what entries of the API reference say, by their ids.
        linked: Dict of what entries of the API reference link to, likewise.
    """

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__()
        self.path = path
        self.names = set()
        self.links = []
        self.loaded = []
        self.codes = []
        self.texts = {"": ""}
        self.linked = {"": []}
        self._entry = ""
        self._open = []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        attrs = {name: value or "" for name, value in attrs}
        if "id" in attrs:
            self.names.add(attrs["id"])
        if tag == "a" and "href" in attrs:
            self.links.append(attrs["href"])
            self.linked[self._entry].append(attrs["href"])
        if tag == "link" and attrs.get("rel") not in {
            *("canonical", "next", "prev"),
        }:
            self.loaded.append(attrs["href"])
        if LOADED.get(tag) in attrs:
            self.loaded.append(attrs[LOADED[tag]])
        if "doc-heading" in attrs.get("class", "").split():
            self._entry = attrs["id"]
            self.texts[self._entry] = ""
            self.linked[self._entry] = []
        if tag not in {"br", "hr", "img", "input", "link", "meta", "source"}:
            self._open.append(tag)
        if tag == "code":
            self.codes.append("")

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if "p" in self._open:
            self.texts[self._entry] += data
        if "code" in self._open:
            self.codes[-1] += data
