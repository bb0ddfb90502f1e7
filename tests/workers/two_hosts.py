"""Two hosts, as two network namespaces with a cable between them.

`unshare --map-root-user --net python -m workers.two_hosts COMMAND...` runs a
command on both, with INDEX in its words replaced by 0 and 1, and prints what
each wrote to its stdout, as a list in JSON. Sockets that ask for any port get
one of RANDOM there.
"""

import contextlib
import json
import pathlib
import subprocess
import sys

ADDRESSES = ("10.11.0.1", "10.11.0.2")
# Another one of the first host.
OTHER = "10.11.0.9"
RANDOM = range(42000, 43000)
_RANGE = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range")
_SET_RANGE = f"echo {RANDOM[0]} {RANDOM[-1]} > {_RANGE}"


def _call(*words):
    subprocess.run(words, check=True)


@contextlib.contextmanager
def second_host():
    """Words that run what follows them on the second host."""
    with subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as host:
        host.stdout.readline()  # its namespace is there
        there = ("nsenter", f"--net=/proc/{host.pid}/ns/net")
        cable = "ip link add name cable0 type veth peer name cable1"
        _call(*cable.split())
        _call(*["ip", "link", "set", "cable1", "netns"], str(host.pid))
        for way, name, own in (
            ((), "cable0", (ADDRESSES[0], OTHER)),
            (there, "cable1", ADDRESSES[1:]),
        ):
            for address in own:
                _call(*way, *f"ip address add {address}/24 dev {name}".split())
            for each in ("lo", name):
                _call(*way, *f"ip link set {each} up".split())
            _call(*way, "sh", "-c", _SET_RANGE)
        try:
            yield there
        finally:
            host.stdin.close()


def main(command):
    """Runs it on both."""
    with second_host() as there:
        started = [
            subprocess.Popen(
                [*way, *(word.replace("INDEX", index) for word in command)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for way, index in (((), "0"), (there, "1"))
        ]
        shown = [process.communicate()[0] for process in started]
    print(json.dumps(shown))
    sys.exit(max(process.returncode for process in started))


if __name__ == "__main__":
    main(sys.argv[1:])
