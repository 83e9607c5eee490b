"""What a finished or running run cost and achieved, read from its events alone."""

import sys

from muster import CallablePackage

sys.modules[__name__].__class__ = CallablePackage
