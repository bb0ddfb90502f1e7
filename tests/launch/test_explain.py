"""`keras-dist explain` shows what the documentation says of an error."""

import shlex

import pytest

from keras_dist import errors
from keras_dist.cli.explain import sections

# The command imports no framework.
pytestmark = pytest.mark.runs_on("torch")

CLASSES = [name for name in errors.__all__ if name != "KerasDistError"]


def test_without_a_section_it_lists_all(invoke):
    result = invoke("explain")
    assert result.exit_code == 0, result.output
    for title in sections():
        assert f"{errors.anchor_of(title)} " in result.output
    for name in CLASSES:
        assert name in result.output
    assert "a-loop-that-is-not-distributed  a warning" in result.output


def test_it_takes_a_title_and_what_addresses_end_with(invoke):
    for title in sections():
        result = invoke(f"explain {errors.anchor_of(title)}")
        assert result.exit_code == 0, result.output
        text, address = result.stdout.strip().rsplit("\n\n", maxsplit=1)
        assert text == f"## {title}\n{sections()[title]}".strip()
        assert address == errors.address_of(title)
        for words in ([title.upper()], title.split()):
            spelled = f"explain {shlex.join(words)}"
            assert invoke(spelled).stdout == result.stdout


def test_it_takes_the_class_of_an_error(invoke):
    for name in CLASSES:
        result = invoke(f"explain {name}")
        assert result.exit_code == 0, result.output
        section = getattr(errors, name).section
        assert result.stdout.startswith(f"## {section}\n")
        # As tracebacks and users write it.
        for prefix in ("keras_dist.errors.", "keras_dist."):
            assert invoke(f"explain {prefix}{name}").stdout == result.stdout
        assert invoke(f"explain {name.lower()}").stdout == result.stdout


def test_an_error_ends_with_a_command_that_works(invoke):
    message = str(errors.DeviceError("There is no such device."))
    program, _, line = message.rpartition("run: ")[2].partition(" ")
    assert program == "keras-dist"
    result = invoke(line)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("## Devices\n")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("device", "Did you mean devices?"),
        ("DevicesError", "Did you mean devices?"),
        ("the numbers", "Did you mean the-numbers-differ?"),
        ("xyzzy", None),
    ],
)
def test_an_unknown_section_is_an_error_that_names_near_ones(
    invoke, name, meant
):
    result = invoke(f"explain {name}")
    assert result.exit_code == 2
    assert not result.stdout
    assert f"no section {name!r}" in result.stderr
    assert "`keras-dist explain` lists all of them." in result.stderr
    assert (meant or "") in result.stderr
    assert ("Did you mean" in result.stderr) == (meant is not None)


def test_on_a_terminal_it_is_rendered(invoke, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = invoke("explain Devices")
    assert result.exit_code == 0, result.output
    assert "\x1b[" in result.stdout
    assert "```" not in result.stdout
