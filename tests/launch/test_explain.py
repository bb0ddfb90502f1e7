"""`keras-dist explain`: what the documentation says of an error."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from keras_dist import errors
from keras_dist.cli.explain import sections
from keras_dist.cli.main import app

# The command imports no framework.
pytestmark = pytest.mark.runs_on("torch")

CLASSES = [name for name in errors.__all__ if name != "KerasDistError"]


def explain(*arguments):
    return CliRunner().invoke(app, ["explain", *arguments])


def test_without_a_section_it_lists_all():
    result = explain()
    assert result.exit_code == 0, result.output
    for title in sections():
        assert f"{errors.anchor_of(title)} " in result.output
    for name in CLASSES:
        assert name in result.output
    assert "a-loop-that-is-not-distributed  a warning" in result.output


@pytest.mark.parametrize("title", sections())
def test_it_takes_a_title_and_what_addresses_end_with(title):
    result = explain(errors.anchor_of(title))
    assert result.exit_code == 0, result.output
    text, address = result.stdout.strip().rsplit("\n\n", maxsplit=1)
    assert text == f"## {title}\n{sections()[title]}".strip()
    assert address == errors.address_of(title)
    assert explain(title.upper()).stdout == result.stdout
    assert explain(*title.split()).stdout == result.stdout


@pytest.mark.parametrize("name", CLASSES)
def test_it_takes_the_class_of_an_error(name):
    result = explain(name)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"## {getattr(errors, name).section}\n")
    # As tracebacks and users write it.
    for other in (f"keras_dist.errors.{name}", f"keras_dist.{name}"):
        assert explain(other).stdout == result.stdout
    assert explain(name.lower()).stdout == result.stdout


def test_an_error_ends_with_a_command_that_works():
    message = str(errors.DeviceError("There is no such device."))
    command = message.rpartition("run: ")[2]
    program, *arguments = command.split()
    assert program == "keras-dist"
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("## Devices\n")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("device", "Did you mean devices?"),
        ("DevicesError", "Did you mean devices?"),
        ("the numbers", "Did you mean the-numbers-differ?"),
        ("xyzzy", "any case"),
    ],
)
def test_an_unknown_section_is_an_error_that_names_near_ones(name, meant):
    result = explain(name)
    assert result.exit_code == 2
    assert not result.stdout
    assert f"no section {name!r}" in result.stderr
    assert "`keras-dist explain` lists all of them." in result.stderr
    assert (meant in result.stderr) == (name != "xyzzy")
    assert ("Did you mean" in result.stderr) == (name != "xyzzy")


def test_on_a_terminal_it_is_rendered(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = explain("Devices")
    assert result.exit_code == 0, result.output
    assert "\x1b[" in result.stdout
    assert "```" not in result.stdout


def test_it_imports_neither_keras_nor_a_framework():
    code = (
        "import sys\n"
        "from keras_dist.cli.main import app\n"
        "app(['explain', 'devices'], standalone_mode=False)\n"
        "heavy = {'keras', 'numpy', 'jax', 'tensorflow', 'torch'}\n"
        "sys.exit(bool(heavy & set(sys.modules)))"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
