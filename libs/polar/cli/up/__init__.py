"""`polar up`: everything on this machine, under one supervisor and in one folder.

The broker and the model are the embedded ones unless others are named; the services do not know which they have.
`Up` is the whole of it as a context manager, for `polar demo` and tests; `find_running` is how other commands find it.
"""

from .discover import Running, find_running, use_running
from .errors import CannotUp
from .plan import Wish
from .up import Up

__all__ = ["CannotUp", "Running", "Up", "Wish", "find_running", "use_running"]
