"""Google's API client, imported where it is needed."""

import importlib
from typing import Any


def build_service(
    name: str, version: str, credentials: Any, needed_by: str, **options: Any
) -> Any:
    """A service of Google's API client.

    Args:
        name: String, such as `"compute"`.
        version: String, such as `"v1"`.
        credentials: The client's credentials; `"default"` and `None` for
            those of the environment.
        needed_by: String, a class, for the message.
        **options: More arguments of `googleapiclient.discovery.build`.

    Raises:
        ImportError: If the client is not installed.
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
