"""Environment variables of interest, without secrets and names of hosts."""

import itertools
import json
import os
import re
from collections.abc import Iterable
from collections.abc import Mapping

from keras_dist.environment.hostlist import hosts_of

# Variables that cluster resolvers read.
_CLUSTER = (
    "KERAS_DIST_WORKERS",
    "KERAS_DIST_WORKER_INDEX",
    "KERAS_DIST_RESTARTS",
    "KERAS_DIST_COORDINATOR",
    "KERAS_DIST_JOB",
    "TF_CONFIG",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_TASKS_PER_NODE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "PMI_RANK",
    "PMI_SIZE",
    "TPU_NAME",
    "TPU_WORKER_ID",
    "TPU_WORKER_HOSTNAMES",
    "KUBERNETES_SERVICE_HOST",
)
_WITH_HOSTS = (
    "KERAS_DIST_WORKERS",
    "KERAS_DIST_COORDINATOR",
    "TF_CONFIG",
    "MASTER_ADDR",
    "SLURM_STEP_NODELIST",
    "TPU_NAME",
    "TPU_WORKER_HOSTNAMES",
    "KUBERNETES_SERVICE_HOST",
)
_OTHERS = re.compile(
    r"(KERAS|JAX|XLA|TORCH|PYTORCH|CUDA|NCCL|GLOO|ROCR|HIP|OMP|MKL|NVIDIA|TPU"
    r"|LIBTPU|TF_(CPP|CUDNN|DETERMINISTIC|ENABLE|FORCE|GPU|NUM|USE|XLA))_"
    # What an image of CUDA requires of drivers is a page, and the same for all.
    r"(?!REQUIRE_).*"
)
# PAT and PASS count as whole words only, because of PATH and PATTERN.
_SECRET = re.compile(
    r"KEY|TOKEN|SECRET|PASSW|PASSPHRASE|PWD|CRED|AUTH"
    r"|(?<![A-Z])(PAT|PASS)(?![A-Z])",
    re.I,
)
# The user and the password in an address such as https://me:mine@a.corp.
_USER = re.compile(r"(?<=://)[^\s/]+@")
# A host's name or address, with dots inside and without a port.
_HOST = re.compile(r"[A-Za-z0-9_](?:[\w.-]*[\w\]])?")
_OWN = ("localhost", "127.0.0.1")
# A part of a list of addresses: commas in brackets don't end it.
_ADDRESS = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\]?|\])+")
# The brackets of Slurm's short forms, as in node[1-3,08].
_RANGES = re.compile(r"\[(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\]")
# Of longer lists the short form is hidden as a whole.
_MOST_HOSTS = 1000


class Masks:
    """Replaces names of hosts by `host1` and so on, the same everywhere."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._names: dict[str, str] = {}
        self._count = 0
        # Short forms, and a pattern of the hosts that each stands for.
        patterns: list[str] = []
        for variable in _WITH_HOSTS:
            for address in _addresses(environ.get(variable, "")):
                if _RANGES.search(address):
                    self._note_all(address)
                    patterns.append(_pattern(address))
                else:
                    self._note(address)
        known = sorted(self._names, key=len, reverse=True)
        either = "|".join([*map(re.escape, known), *patterns]) or r"(?!)"
        self._known = re.compile(rf"(?<![\w.-])(?:{either})(?![\w-]|\.\w)")

    def __call__(self, text: str) -> str:
        """Returns the text without names of hosts, users and passwords."""
        text = self._known.sub(lambda match: self._name(match[0]), text)
        return _USER.sub("(not shown)@", text)

    def _note(self, address: str) -> None:
        host, colon, port = address.rpartition(":")
        host = host if colon and port.isdecimal() else address
        host = host.removeprefix("grpc://").strip("[]")
        # A number alone is no host, and may be a count in other variables.
        if host and host not in _OWN and not host.isdecimal():
            self._name(host)

    def _note_all(self, short: str) -> None:
        """Notes the hosts that a short form of Slurm stands for."""
        try:
            hosts = [*itertools.islice(hosts_of(short), _MOST_HOSTS + 1)]
        except ValueError:
            hosts = []
        if not 0 < len(hosts) <= _MOST_HOSTS:
            self._name(short)
            return
        self._names[short] = ",".join(map(self._name, hosts))

    def _name(self, host: str) -> str:
        if host not in self._names:
            self._count += 1
            self._names[host] = f"host{self._count}"
        return self._names[host]


def _pattern(short: str) -> str:
    """Returns a pattern of the hosts that a short form may stand for."""
    return r"\d+".join(map(re.escape, _RANGES.split(short)[::2]))


def _addresses(text: str) -> Iterable[str]:
    """Returns the addresses in the value of a variable."""
    if text.lstrip().startswith("{"):
        try:
            cluster = json.loads(text).get("cluster") or {}
        except (ValueError, AttributeError):
            return _HOST.findall(text)
        return [
            address
            for tasks in cluster.values()
            for address in (
                tasks.values() if isinstance(tasks, dict) else tasks
            )
            if isinstance(address, str)
        ]
    return [part.strip() for part in _ADDRESS.findall(text)]


def cluster_variables(
    environ: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Returns the variables of clusters that are set, masked."""
    return _shown(environ, [n for n in _CLUSTER if environ.get(n)])


def other_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns other variables that configure Keras or frameworks, masked."""
    names = [
        name
        for name in sorted(environ)
        if _OTHERS.fullmatch(name) and name not in _CLUSTER
    ]
    return _shown(environ, names)


def _shown(environ: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    masks, home = Masks(environ), os.path.expanduser("~")

    def shown(name: str) -> str:
        if _SECRET.search(name):
            return "(set, not shown)"
        text = masks(environ[name])
        return text.replace(home, "~") if len(home) > 1 else text

    return {name: shown(name) for name in names}
