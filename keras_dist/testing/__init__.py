"""Public helpers for tests of strategies and backends."""

from keras_dist.testing.memory import MemoryBackend
from keras_dist.testing.memory import MemoryExecutor
from keras_dist.testing.memory import MemoryStorage

__all__ = ["MemoryBackend", "MemoryExecutor", "MemoryStorage"]
