"""The coordinator sees who is connected, and needs no Keras."""

import socket
import subprocess
import sys

from keras_dist.joining.addresses import listen
from keras_dist.launch.addresses import free_addresses
from keras_dist_jax.cluster.coordinator import has_connections


def test_connections_are_seen():
    # None that outgoing connections of others get.
    with listen(*free_addresses(1)) as listener:
        port = listener.getsockname()[1]
        assert not has_connections(port)
        with socket.create_connection(listener.getsockname()):
            assert has_connections(port)


def test_it_needs_no_keras():
    code = (
        "import sys, keras_dist_jax.cluster.coordinator as c, keras_dist_jax; "
        "assert callable(c.serve); "
        "sys.exit('keras' in sys.modules or 'jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
