"""How a drill asks a rank to break: a file in the run's folder, and the file that the rank leaves when it does.

::

    {"fault": "exception", "rank": 1, "always": false}
"""

FILE = "inject_fault.json"


def done_file(fault: str) -> str:
    """The file that holds the step at which the rank injected ``fault``."""
    return f"inject_fault.{fault}.done"
