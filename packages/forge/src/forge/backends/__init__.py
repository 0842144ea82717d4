"""Settings of a verb → a finished run, by the trainer that `backend` names.

Files here import `run`, `tasks`, `settings`, the package's own top-level modules and the leaf packages; not `verbs` or `cli`.
"""

from forge.backends._backend import Backend, Capabilities
from forge.backends._names import get, names
from forge.backends._request import Request, read_request

__all__ = ["Backend", "Capabilities", "Request", "get", "names", "read_request"]
