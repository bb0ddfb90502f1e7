"""Sabotages: small edits of product code, each of which breaks one promise."""

import dataclasses
import pathlib
import tomllib

TOP = pathlib.Path(__file__).parents[2]
PATCHES = pathlib.Path(__file__).parent / "patches"
BACKENDS = ("jax", "tensorflow", "torch")


@dataclasses.dataclass(frozen=True)
class Patch:
    """One edit, and the tests that should fail with it.

    Attributes:
        area: The name of the file that has the patch, such as `fit`.
        name: What the edit breaks, in words_like_these.
        promise: A sentence that says what a user would lose.
        file: The edited file, from the top of the checkout.
        old: Text that occurs once in the file.
        new: Text in its place.
        tests: What pytest runs, files or tests.
        backends: Backends on which the tests should fail.
    """

    area: str
    name: str
    promise: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    backends: tuple[str, ...]

    def is_whole(self, top=TOP):
        """Returns whether the old text occurs once in the file."""
        path = top / self.file
        return path.exists() and path.read_text().count(self.old) == 1

    def sabotaged(self, top=TOP):
        """Returns the file's text with the edit."""
        return (top / self.file).read_text().replace(self.old, self.new)


def load(folder=PATCHES):
    """Returns all patches, in the order of files and of places in them."""
    found = []
    for path in sorted(folder.glob("*.toml")):
        for name, fields in tomllib.loads(path.read_text()).items():
            lists = {key: tuple(fields.pop(key)) for key in _LISTS}
            found.append(Patch(path.stem, name, **fields, **lists))
    return found


_LISTS = ("tests", "backends")
