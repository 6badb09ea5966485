"""The lock that allows only one load of a model at a time.

While transformers fills a model, it replaces methods of its own base class for the whole process. Two overlapping loads
would leave the methods replaced, and later models of the process would lack their tied weights.
"""

import threading
from typing import Final

LOADING: Final = threading.RLock()
"""Every caller of `from_pretrained` or `from_config` of a transformers model has to hold this lock."""
