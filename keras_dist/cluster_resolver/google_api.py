"""Lazy import of Google's API client."""

import importlib
from typing import Any


def build_service(
    name: str, version: str, credentials: Any, needed_by: str, **options: Any
) -> Any:
    """Creates a service of Google's API client, such as `"compute"` `"v1"`.

    The credentials `"default"` and `None` mean those of the environment.
    Raises `ImportError`, which names the class `needed_by`, if the client is
    not installed.
    """
    try:
        discovery = importlib.import_module("googleapiclient.discovery")
    except ImportError as error:
        raise ImportError(
            f"{needed_by} needs Google's API client. Install it with `pip "
            "install google-api-python-client`, or pass `service`."
        ) from error
    return discovery.build(
        name,
        version,
        credentials=None if credentials == "default" else credentials,
        cache_discovery=False,
        **options,
    )
