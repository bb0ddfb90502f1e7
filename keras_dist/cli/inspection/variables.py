"""Environment variables of interest, without secrets and names of hosts."""

import json
import os
import re
from collections.abc import Iterable
from collections.abc import Mapping

# Variables that cluster resolvers read.
_CLUSTER = (
    "KERAS_DIST_WORKERS",
    "KERAS_DIST_WORKER_INDEX",
    "KERAS_DIST_RESTARTS",
    "KERAS_DIST_COORDINATOR",
    "TF_CONFIG",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
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
    r"|LIBTPU|TF_(CPP|CUDNN|DETERMINISTIC|ENABLE|FORCE|GPU|NUM|USE|XLA))_.*"
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


class Masks:
    """Replaces names of hosts by `host1`, `host2` and so on.

    Users and passwords in addresses are hidden too. A host has the same number
    in all variables, so that wrong addresses can be found.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._names: dict[str, str] = {}
        for variable in _WITH_HOSTS:
            for address in _addresses(environ.get(variable, "")):
                self._note(address)

    def __call__(self, text: str) -> str:
        """Returns the text without names of hosts, users and passwords."""
        for host in sorted(self._names, key=len, reverse=True):
            pattern = rf"(?<![\w.-]){re.escape(host)}(?![\w-]|\.\w)"
            text = re.sub(pattern, self._names[host], text)
        return _USER.sub("(not shown)@", text)

    def _note(self, address: str) -> None:
        host, colon, port = address.rpartition(":")
        host = host if colon and port.isdecimal() else address
        host = host.removeprefix("grpc://").strip("[]")
        if host and host not in _OWN:
            self._names.setdefault(host, f"host{len(self._names) + 1}")


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
    return [part.strip() for part in text.split(",")]


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
