"""One load at a time.

While transformers fills a model it replaces methods of its own base class for the whole process. Two loads that overlap
would leave them replaced, and every later model of the process without its tied weights.
"""

import threading
from typing import Final

LOADING: Final = threading.RLock()
"""Held by whoever calls `from_pretrained` or `from_config` of a transformers model."""
