"""Between hosts, those ports are open that the page about workers names."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from parity.harness import BACKEND
from tables import NAMES
from workers import listening_script
from workers import two_hosts

TESTS = pathlib.Path(__file__).parent.parent
PAGE = TESTS.parent.joinpath("docs", "pages", "guide", "many_workers.md")
ISOLATED = ["unshare", "--map-root-user", "--net"]
LIMIT = 200


def on_two_hosts(*command):
    """What a command writes on each of two hosts."""
    done = subprocess.run(
        [*ISOLATED, sys.executable, "-m", "workers.two_hosts", *command],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": f"{TESTS}{os.pathsep}{os.environ['PYTHONPATH']}",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        },
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def _can_isolate():
    done = subprocess.run(
        [*ISOLATED, "ip", "link", "add", "name", "cable0", "type", "veth"],
        capture_output=True,
        check=False,
    )
    return done.returncode == 0


can_isolate = pytest.mark.skipif(
    not _can_isolate(),
    reason="This system lets users make no network namespaces with a cable "
    "between them, which stand for two hosts.",
)
pytestmark = can_isolate


def row():
    """What the page says of this backend: of the first host, of others."""
    rows = re.findall(r"^\| (\w+) \| (.+) \| (.+) \|$", PAGE.read_text(), re.M)
    return {name: told for name, *told in rows}[NAMES[BACKEND]]


def test_the_ports_that_the_page_names_are_those_that_are_open():
    hosts = ",".join(f"{address}:9000" for address in two_hosts.ADDRESSES)
    shown = on_two_hosts(
        *(sys.executable, "-m", "keras_dist.cli", "run", "--workers", "2"),
        *("--devices", "1", "--hosts", hosts, "--host-index", "INDEX"),
        listening_script.__file__,
    )
    for text, told in zip(shown, row(), strict=True):
        (found,) = re.findall(r"listening (.*)", text)
        named = sorted(
            "random" if int(port) in two_hosts.RANDOM else port
            for port in found.split()
        )
        assert named == sorted(re.findall(r"\b\d{4}\b|random", told))
