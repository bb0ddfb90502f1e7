"""Public helpers for tests of strategies and backends."""

from keras_dist.testing.memory import MemoryBackend
from keras_dist.testing.memory import MemoryExecutor
from keras_dist.testing.memory import MemoryHome

__all__ = ["MemoryBackend", "MemoryExecutor", "MemoryHome"]
